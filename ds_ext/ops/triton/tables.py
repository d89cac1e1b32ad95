"""Launches of kernels over the parameters of a table, and the one copy that brings their tables."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext.ops.triton import sizes
from ds_ext.ops.triton.columns import AT
from ds_ext.ops.triton.tiles import Numbers

Constants: TypeAlias = tuple[tuple[str, Any], ...]
HostNumber: TypeAlias = float | NDArray[np.float32]  # one for all parameters, or one for each
Shape: TypeAlias = tuple[dict[str, Any], int]  # the constants that are sizes, and warps
TOGETHER = 1024  # parameters of a launch at most: each program looks for its own among them


@dataclass(frozen=True)
class Launch:
    """One kernel over some parameters: those with the same constants can be one.

    ``numbers`` are those that no tensor on the device holds, one for all or one for each, by
    columns; where they will lie is filled in when the table is copied. ``alive`` is what the
    table points to, which must not be freed before.
    """

    kernel: str
    constants: Constants
    device: torch.device
    rows: Numbers  # [n, columns]
    programs: Numbers  # of each parameter, [n]
    numbers: Mapping[str, HostNumber]
    alive: Sequence[object]


def merged(launches: Iterable[Launch]) -> list[Launch]:
    """Returns launches that do not depend on each other, those that are alike as one."""
    alike: dict[tuple[Any, ...], list[Launch]] = {}
    for one in launches:
        alike.setdefault((one.device, one.kernel, one.constants), []).append(one)
    made = []
    for some in alike.values():
        one = some[0] if len(some) == 1 else _joined(some)
        made += [_part(one, i, i + TOGETHER) for i in range(0, len(one.rows), TOGETHER)]
    return made


def _joined(some: Sequence[Launch]) -> Launch:
    first = some[0]
    numbers: dict[str, HostNumber] = {}
    for name, number in first.numbers.items():
        if all(type(x.numbers[name]) is float and x.numbers[name] == number for x in some):
            numbers[name] = number
        else:
            numbers[name] = np.concatenate([_of_each(x, name) for x in some])
    rows = np.concatenate([x.rows for x in some])
    programs = np.concatenate([x.programs for x in some])
    alive = [x.alive for x in some]
    return Launch(first.kernel, first.constants, first.device, rows, programs, numbers, alive)


def _of_each(one: Launch, name: str) -> NDArray[np.float32]:
    """A number of each parameter, [n]."""
    number = one.numbers[name]
    return np.full(len(one.rows), number, dtype=np.float32)


def _part(one: Launch, start: int, stop: int) -> Launch:
    """The launch of some of the parameters."""
    if start == 0 and len(one.rows) <= stop:
        return one
    at = slice(start, stop)
    numbers = {k: x if isinstance(x, float) else x[at] for k, x in one.numbers.items()}
    rows, programs = one.rows[at], one.programs[at]
    return Launch(one.kernel, one.constants, one.device, rows, programs, numbers, one.alive)


def run(launches: Sequence[Launch]) -> None:
    """Makes launches on one device, one after another, whose tables go there in one copy.

    The device need not be the current one.
    """
    device = launches[0].device
    places, words = [], 0  # in words of 8 bytes, tables from multiples of 16 bytes on
    for one in launches:
        places.append(words)
        floats = sum(1 if isinstance(x, float) else len(x) for x in one.numbers.values())
        words += one.rows.size + -(-floats // 2)
        words += words % 2
    is_pinned = device.type == "cuda"
    host = torch.empty(words, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
    with current(device):
        held = torch.empty(words, dtype=torch.int64, device=device)
        array, address = host.numpy(), held.data_ptr()
        programs = [
            _fill(one, array[at:], address + 8 * at)
            for one, at in zip(launches, places, strict=True)
        ]
        held.copy_(host, non_blocking=True)
        for one, at, number in zip(launches, places, programs, strict=True):
            count = len(one.rows)
            named, warps = constants(one.kernel, one.constants, bits(count))
            start(one.kernel, number, held[at:], count, named, warps)


def _fill(one: Launch, words: Numbers, address: int) -> int:
    """Writes a launch's table, which will lie at ``address``, and its numbers after that.

    -> its programs
    """
    base = one.rows.size
    table = words[:base].reshape(one.rows.shape)
    table[:] = one.rows
    ends = one.programs.cumsum()
    np.subtract(ends, one.programs, out=table[:, AT["first"]])
    floats, at = words[base:].view(np.float32), 0
    for name, values in one.numbers.items():
        column = address + 8 * base + 4 * at
        if isinstance(values, float):
            floats[at] = values
            table[:, AT[name]] = column
            at += 1
        else:
            floats[at : at + len(values)] = values
            table[:, AT[name]] = column + 4 * np.arange(len(values))
            at += len(values)
    return int(ends[-1])


def bits(count: int) -> int:
    """The power of two that a program looks for its parameter among, at least 16."""
    return max(4, (count - 1).bit_length())


def start(
    kernel: str, programs: int, table: Tensor, count: int, named: Mapping[str, Any], warps: int
) -> None:
    """Launches a kernel on the current device, which ``named``, of ``constants``, belongs to.

    What Triton has compiled for it is kept, for to find it again takes Triton most of a launch.
    """
    # Triton compiles another for a count of 1, which it takes for a constant, and for a multiple of
    # 16; a table begins at one of 16 bytes, always.
    key = kernel, id(named), warps, table.device, count == 1, count % 16 == 0
    if key in _compiled:
        handle, values, _ = _compiled[key]
        handle[programs, 1, 1](table, count, *values)
        return
    function = getattr(_kernels(), kernel)
    handle = function[(programs,)](table, count, **named, **options(warps))
    if handle is not None and _kernels().VERSION >= (3, 4):  # none is of the interpreter
        values = [named[name] for name in function.arg_names[2:]]
        _compiled[key] = handle, values, named


# Kernels as Triton has compiled them, and the values of their constants in the order of their
# arguments, with the dict that these are of: its id is not another's while it is here.
_compiled: dict[tuple[Any, ...], tuple[Any, Sequence[Any], Mapping[str, Any]]] = {}


def options(warps: int) -> dict[str, Any]:
    """How Triton compiles a kernel: products are rounded before they are added, as elsewhere.

    Its own default differs from version to version.
    """
    return {"num_warps": warps, "enable_fp_fusion": False}


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a GPU the current one, which Triton launches on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def constants(kernel: str, given: Constants, log2_count: int) -> tuple[dict[str, Any], int]:
    """All constants of a kernel, and its number of warps."""
    named, kernels = dict(given), _kernels()
    for name in named.keys() & {"FORM", "KEPT"}:
        named[name] = getattr(kernels, named[name])
    for name in named.keys() & {"XD", "WD", "AD"}:
        named[name] = getattr(kernels.tl, named[name])
    named["COUNT"] = 1 << log2_count
    shape, warps = _SHAPES.get(kernel, _of_tiles)(dict(given))
    return named | shape, warps


def _of_tiles(named: Mapping[str, Any]) -> Shape:
    """Of a kernel that reads vectors where its runs are aligned."""
    # each element has an address of its own where there are no vectors: fewer to a thread
    warps = sizes.WARPS if named["ALIGNED"] else 2 * sizes.WARPS
    return {"TR": sizes.TR, "TC": sizes.TC}, warps


def _of_groups(named: Mapping[str, Any]) -> Shape:
    shape, warps = _of_tiles(named)
    return shape | {"TC": sizes.GROUP}, warps


def _of_sums(named: Mapping[str, Any]) -> Shape:
    return {"TR": sizes.TR, "TC": sizes.TC}, sizes.WARPS


def _of_statistics(named: Mapping[str, Any]) -> Shape:
    return {"TC": sizes.LONG}, sizes.LONG_WARPS


def _of_strips(named: Mapping[str, Any]) -> Shape:
    """Of rows that are as wide as a tile, and read while those before them are summed."""
    wide = named["TC"]
    # two stages where three would not fit into registers, one where there are no vectors
    fits = named["XD"] != "float32" and wide < sizes.WIDEST
    stages = min(sizes.STAGES, 3 if fits else 2) if named["ALIGNED"] else 1
    shape = {"TR": min(sizes.WIDE_ROWS, sizes.WIDE_ELEMENTS // wide), "TC": wide}
    shape |= {"STRIP": sizes.STRIP, "STAGES": stages}
    return shape, min(sizes.WIDE_WARPS, wide // sizes.WIDE_COLS)


def _of_wide_strips(named: Mapping[str, Any]) -> Shape:
    return {"TC": sizes.TC, "STRIP": sizes.STRIP}, sizes.LONG_WARPS


_SHAPES: dict[str, Callable[[Mapping[str, Any]], Shape]] = {
    "weighed": _of_strips,
    "normalize_whole_rows": _of_strips,
    "wide_weighed": _of_wide_strips,
    "normalize_wide_rows": _of_wide_strips,
    "factors": _of_statistics,
    "clipped_factors": _of_statistics,
    "normalize": _of_statistics,
    "mark": _of_groups,
    "mend": _of_groups,
    "mend_unmarked": _of_groups,
    "fold": _of_sums,
}


def _kernels() -> ModuleType:
    """The kernels, imported when first asked for: they take Triton with them."""
    from ds_ext.ops.triton import kernels

    return kernels
