"""Kernel launches over the parameters of a table; one copy brings the tables of all launches."""

import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext.ops.executors.triton import sizes
from ds_ext.ops.executors.triton.columns import AT, COLUMNS
from ds_ext.ops.executors.triton.launch_memory import Memory
from ds_ext.ops.executors.triton.tiles import Int64s, Tiles


class KernelConstants:
    """A kernel constant with named fields, which may be ``KernelConstants`` themselves.

    Triton identifies constants by ``repr``, from which it also derives names. Nested tuples would
    not do, because some versions of Triton do not support them.
    """

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        text = ", ".join(f"{name}={value!r}" for name, value in sorted(fields.items()))
        self._name = "of_" + hashlib.sha256(text.encode()).hexdigest()[:16]
        vars(self).update(fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the kernel has no constant {name}. Its constants: {', '.join(self.fields)}"
        )

    def __repr__(self) -> str:
        return self._name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelConstants) and self._name == other._name

    def __hash__(self) -> int:
        return hash(self._name)


Constants: TypeAlias = tuple[tuple[str, Any], ...]
HostNumber: TypeAlias = float | NDArray[np.float32]  # one for all parameters, or one for each
FusedPasses: TypeAlias = KernelConstants  # passes that a program runs in turn
MAX_PARAMETERS = 1024  # per launch: each program searches them for its own
# Passes in which an element depends on no other element that an earlier pass has written.
BY_ELEMENT = {"square_sums", "row_col_sums", "lerp", "square_lerp"}
BY_ELEMENT |= {"apply", "noting_apply", "measured_apply"}
# Forms whose quotients of roots need more registers than any form of a matrix. A merged kernel uses
# the registers of its most demanding pass, so these forms have their own launch.
OF_VECTORS = {"IS_VECTOR", "IS_VECTOR_RESIDUAL"}
# Passes whose bits do not depend on the number of warps.
ANY_WARPS = {"lerp", "square_lerp", "apply", "copy_checked_values"}


@dataclass(frozen=True, eq=False)
class Launch:
    """One pass over some parameters of a table.

    ``numbers`` are the host's numbers by column, one for all parameters or one for each; their
    addresses are filled in when the table is copied. ``alive`` holds the tensors that the table
    points to, so that they are not freed before the launch.
    """

    kernel: str
    constants: Constants
    tiles: Tiles
    own: Int64s | None  # the indices of its parameters in ``tiles``; None: all
    rows: Int64s  # [n, columns]
    programs: Int64s  # of each parameter, [n]
    numbers: Mapping[str, HostNumber]
    alive: Sequence[object]

    def is_over(self, other: "Launch") -> bool:
        """Whether each program of both has the same elements, and reads no other program's."""
        if not {self.kernel, other.kernel} <= BY_ELEMENT or self.tiles is not other.tiles:
            return False
        if self.own is None or other.own is None:
            return self.own is other.own
        return np.array_equal(self.own, other.own)

    def part(self, start: int, stop: int) -> "Launch":
        """Returns the launch over parameters [start, stop)."""
        if start == 0 and len(self.rows) <= stop:
            return self
        at = slice(start, stop)
        numbers = {k: x if isinstance(x, float) else x[at] for k, x in self.numbers.items()}
        return replace(self, rows=self.rows[at], programs=self.programs[at], numbers=numbers)


# Launches over the same elements; each program makes them one after another.
Chain: TypeAlias = Sequence[Launch]


@dataclass(frozen=True, eq=False)
class MergedLaunch:
    """Several chains merged into one launch, whose parameters have different kinds of passes."""

    chains: list[Chain]
    kinds: tuple[FusedPasses, ...]
    of_each: list[int]  # the kind of each chain
    warps: int

    @functools.cached_property
    def count(self) -> int:
        """The number of parameters."""
        return sum(len(chain[0].rows) for chain in self.chains)

    @functools.cached_property
    def passes(self) -> int:
        """The number of table rows per parameter."""
        return max(map(len, self.chains))

    @property
    def table_words(self) -> int:
        """The size of the table in 8-byte words."""
        return self.count * self.passes * len(COLUMNS)

    @property
    def words(self) -> int:
        """The size of the table and its numbers in 8-byte words, rounded up to 16 bytes."""
        given = [x for chain in self.chains for one in chain for x in one.numbers.values()]
        floats = sum(1 if isinstance(x, float) else len(x) for x in given)
        words = self.table_words + -(-floats // 2)
        return words + words % 2


def merge_launches(chains: Iterable[Chain]) -> list[MergedLaunch]:
    """Merges independent chains on one device into one launch per number of warps.

    Updates of vectors have their own launch, unless there are only vectors.
    """
    found = [*chains]
    apart = [x for x in found if dict(x[0].constants).get("FORM") in OF_VECTORS]
    if apart and len(apart) < len(found):
        rest = [x for x in found if not any(x is y for y in apart)]
        return [*merge_launches(rest), *merge_launches(apart)]
    by_warps: dict[int, list[tuple[Chain, FusedPasses]]] = {}
    others: list[tuple[Chain, FusedPasses, int]] = []  # may use any number of warps
    for chain in found:
        kind, warps = _kind(tuple((one.kernel, one.constants) for one in chain))
        if all(one.kernel in ANY_WARPS for one in chain):
            others.append((chain, kind, warps))
        else:
            by_warps.setdefault(warps, []).append((chain, kind))
    if others:
        warps = max(by_warps, key=lambda warps: len(by_warps[warps]), default=others[0][2])
        by_warps.setdefault(warps, []).extend((chain, kind) for chain, kind, _ in others)
    return [one for warps, some in by_warps.items() for one in _merged_launches(some, warps)]


def _merged_launches(
    given: Sequence[tuple[Chain, FusedPasses]], warps: int
) -> Iterator[MergedLaunch]:
    """Launches of up to ``MAX_PARAMETERS`` parameters each."""
    some: list[tuple[Chain, FusedPasses]] = []
    count = 0
    for chain, kind in given:
        start, n = 0, len(chain[0].rows)
        while start < n:
            stop = min(n, start + MAX_PARAMETERS - count)
            some.append(([one.part(start, stop) for one in chain], kind))
            count, start = count + stop - start, stop
            if count == MAX_PARAMETERS:
                yield _merged_launch(some, warps)
                some, count = [], 0
    if some:
        yield _merged_launch(some, warps)


def _merged_launch(some: Sequence[tuple[Chain, FusedPasses]], warps: int) -> MergedLaunch:
    # ordered by first use, so that equal sets of kinds share a compiled kernel
    kinds = sorted({kind for _, kind in some}, key=lambda kind: _met.setdefault(kind, len(_met)))
    of_each = [kinds.index(kind) for _, kind in some]
    return MergedLaunch([chain for chain, _ in some], tuple(kinds), of_each, warps)


_met: dict[FusedPasses, int] = {}


def launch_all(joints: Sequence[MergedLaunch], memory: Memory) -> None:
    """Runs launches one after another, after one copy of all their tables.

    Args:
        joints: the launches.
        memory: of their device, which need not be the current one.
    """
    sizes_of_each = [one.words for one in joints]
    words = sum(sizes_of_each)
    host = memory.host(words)
    with current(memory.device):
        held = memory.scratch(2 * words).view(torch.int64)
        array, address, at = host.numpy(), held.data_ptr(), 0
        made = []
        for one, size in zip(joints, sizes_of_each, strict=True):
            made.append((one, at, _fill(one, array[at:], address + 8 * at)))
            at += size
        held.copy_(host, non_blocking=True)
        for one, at, programs in made:
            named = constants(one.kinds, one.passes, log2_padded_count(one.count))
            launch_kernel(_label(one.kinds), programs, held[at:], one.count, named, one.warps)


def _fill(joint: MergedLaunch, words: Int64s, address: int) -> int:
    """Writes a launch's table, then its numbers; returns the number of programs.

    The table will be copied to ``address`` on the device.
    """
    base, count, passes = joint.table_words, joint.count, joint.passes
    table = words[:base].reshape(count, passes, len(COLUMNS))
    floats, used, row = words[base:].view(np.float32), 0, 0
    for chain, kind in zip(joint.chains, joint.of_each, strict=True):
        n = len(chain[0].rows)
        for i, one in enumerate(chain):
            own = table[row : row + n, i]
            own[:] = one.rows
            for name, values in one.numbers.items():
                column = address + 8 * base + 4 * used
                if isinstance(values, float):
                    floats[used] = values
                    own[:, AT[name]] = column
                    used += 1
                else:
                    floats[used : used + n] = values
                    own[:, AT[name]] = column + 4 * np.arange(n)
                    used += n
        table[row : row + n, 0, AT["kind"]] = kind
        row += n
    programs = np.concatenate([chain[0].programs for chain in joint.chains])
    ends = programs.cumsum()
    np.subtract(ends, programs, out=table[:, 0, AT["program"]])
    return int(ends[-1])


def log2_padded_count(count: int) -> int:
    """log2 of the number of table rows that a program searches, at least 4: ``count`` padded."""
    return max(4, (count - 1).bit_length())


def launch_kernel(
    label: str, programs: int, table: Tensor, count: int, named: Mapping[str, Any], warps: int
) -> None:
    """Launches the kernel with the constants ``named``, made by ``constants``, on the current GPU.

    Caches compiled kernels, because Triton's own lookup takes most of the time of a launch.
    """
    # Triton compiles separate kernels for a count of 1 and for multiples of 16. Tables are always
    # aligned to 16 bytes.
    key = id(named), warps, table.device, count == 1, count % 16 == 0
    if key in _compiled:
        handle, values, _ = _compiled[key]
        handle[programs, 1, 1](table, count, *values)
        return
    function = _kernels().run
    handle = function[(programs,)](table, count, **named, **options(warps))
    if handle is not None and _kernels().VERSION >= (3, 4):  # the interpreter returns None
        values = [named[name] for name in function.arg_names[2:]]
        _compiled[key] = handle, values, named


# Compiled kernels, and their constants in the order of the arguments. The dict of the constants is
# kept too: while it is alive, no other dict has its id.
_compiled: dict[tuple[Any, ...], tuple[Any, Sequence[Any], Mapping[str, Any]]] = {}


def options(warps: int) -> dict[str, Any]:
    """Triton's compile options: no fused multiply-add, as elsewhere.

    Triton's default for it differs between versions.
    """
    return {"num_warps": warps, "enable_fp_fusion": False}


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a GPU the current device, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def constants(kinds: tuple[FusedPasses, ...], passes: int, log2_count: int) -> dict[str, Any]:
    """The constants of a launch."""
    found = None
    for number, kind in reversed([*enumerate(kinds)]):
        found = KernelConstants(number=number, passes=kind, rest=found)
    return {"COUNT": 1 << log2_count, "PASSES": passes, "KINDS": found}


def passes_of(kind: FusedPasses) -> list[KernelConstants]:
    """The passes of a kind, in their order."""
    return [kind] + ([] if kind.then is None else passes_of(kind.then))


def kinds_of(named: Mapping[str, Any]) -> list[FusedPasses]:
    """The kinds of passes of a launch: the inverse of ``constants``."""
    found, one = [], named["KINDS"]
    while one is not None:
        found.append(one.passes)
        one = one.rest
    return found


@functools.cache
def _label(kinds: tuple[FusedPasses, ...]) -> str:
    """The label of a launch: the passes of each kind."""
    return " | ".join(", ".join(one.name for one in passes_of(kind)) for kind in kinds)


@functools.cache
def _kind(passes: tuple[tuple[str, Constants], ...]) -> tuple[FusedPasses, int]:
    """Passes that a program makes one after another -> their kind, their number of warps."""
    found, most = None, 0
    for kernel, given in reversed(passes):
        named, warps = _pass(kernel, given)
        found, most = KernelConstants(name=kernel, then=found, **named), max(warps, most)
    assert found is not None
    return found, most


def _pass(kernel: str, given: Constants) -> tuple[dict[str, Any], int]:
    """A pass -> its constants by name, its number of warps."""
    named, kernels = dict(given), _kernels()
    shape, warps = sizes.shape_of(kernel, named)
    for name, numbers in (("FORM", kernels.FORM), ("STORAGE", kernels.HOW)):
        if name in named:
            named[name] = numbers[named[name]].value
    for name in named.keys() & {"XD", "WD", "AD"}:
        named[name] = getattr(kernels.tl, named[name])
    return named | shape, named.pop("WARPS", None) or warps


def _kernels() -> ModuleType:
    """The kernels, imported at their first use because they import Triton."""
    from ds_ext.ops.executors.triton import kernels

    return kernels
