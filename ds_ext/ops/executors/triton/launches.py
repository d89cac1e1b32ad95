"""Merges launches, and runs them; constants of kernels."""

import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ds_ext.ops.executors.triton import sizes
from ds_ext.ops.executors.triton.launch_memory import Memory
from ds_ext.ops.executors.triton.launch_tables import (
    Chain,
    Constants,
    Launch,
    LaunchTables,
    MergedLaunch,
)


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


FusedPasses: TypeAlias = KernelConstants  # passes that a program runs in turn
MAX_PARAMETERS = 1024  # per launch: each program searches them for its own
# Forms whose quotients of roots need more registers than any form of a matrix. A merged kernel uses
# the registers of its most demanding pass, so these forms have their own launch.
OF_VECTORS = {"IS_VECTOR", "IS_VECTOR_RESIDUAL"}
# Passes whose bits do not depend on the number of warps.
ANY_WARPS = {"lerp", "square_lerp", "apply", "copy_checked_values"}


def merge_launches(chains: Iterable[Chain]) -> list[MergedLaunch]:
    """Merges independent chains on one device into one launch per number of warps.

    Updates of vectors have their own launch, unless there are only vectors.
    """
    found = [*chains]
    apart = [x for x in found if dict(x[0].template.constants).get("FORM") in OF_VECTORS]
    if apart and len(apart) < len(found):
        rest = [x for x in found if not any(x is y for y in apart)]
        return [*merge_launches(rest), *merge_launches(apart)]
    by_warps: dict[int, list[tuple[Chain, FusedPasses]]] = {}
    others: list[tuple[Chain, FusedPasses, int]] = []  # may use any number of warps
    for chain in found:
        kind, warps = _kind(tuple((x.template.kernel, x.template.constants) for x in chain))
        if all(part.template.kernel in ANY_WARPS for part in chain):
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
            some.append(([part._replace(start=start, stop=stop) for part in chain], kind))
            count, start = count + stop - start, stop
            if count == MAX_PARAMETERS:
                yield _merged_launch(some, warps)
                some, count = [], 0
    if some:
        yield _merged_launch(some, warps)


def _merged_launch(some: Sequence[tuple[Chain, FusedPasses]], warps: int) -> MergedLaunch:
    # ordered by first use, so that equal sets of kinds share a compiled kernel
    kinds = sorted({kind for _, kind in some}, key=lambda kind: _met.setdefault(kind, len(_met)))
    chains, of_each = [chain for chain, _ in some], [kinds.index(kind) for _, kind in some]
    count, passes = sum(len(chain[0].rows) for chain in chains), max(map(len, chains))
    label = " | ".join(", ".join(one.name for one in passes_of(kind)) for kind in kinds)
    named = constants((*kinds,), passes, log2_padded_count(count))
    return MergedLaunch(chains, (*kinds,), of_each, warps, label, count, passes, named)


_met: dict[FusedPasses, int] = {}


def launch_all(tables: LaunchTables, given: Sequence[Launch], memory: Memory) -> None:
    """Runs launches one after another, after one copy of all their tables.

    Args:
        tables: of the merged launches.
        given: the launches that were merged.
        memory: of their device, which need not be the current one.
    """
    host = memory.host(tables.words)
    with current(memory.device):
        held = memory.scratch(2 * tables.words).view(torch.int64)
        tables.fill(host.numpy(), held.data_ptr(), given)
        held.copy_(host, non_blocking=True)
        for one, start in zip(tables.joints, tables.starts, strict=True):
            launch_kernel(one.label, one.programs, held[start:], one.count, one.named, one.warps)


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
    return torch.cuda.device(device) if device.type == "cuda" else _NULL


_NULL = contextlib.nullcontext()


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
