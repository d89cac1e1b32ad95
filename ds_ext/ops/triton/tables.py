"""How requests that are alike become one launch: a table, and the constants of their kernel."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ds_ext.ops.triton import sizes
from ds_ext.ops.triton.columns import COLUMNS
from ds_ext.ops.triton.request import Request

Shape: TypeAlias = tuple[dict[str, Any], int]  # the constants that are sizes, and warps


def run(requests: Sequence[Request]) -> None:
    """Launches one kernel over the parameters of ``requests``, which are alike but for them.

    On the device that they lie on, which need not be the current one.
    """
    device = requests[0].device
    held = table(requests, device)
    named, warps = constants(requests)
    kernel = getattr(_kernels(), requests[0].kernel)
    programs = sum(request.programs for request in requests)
    with current(device):
        kernel[(programs,)](held, len(requests), **named, num_warps=warps)


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a GPU the current one, which Triton launches on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def table(requests: Sequence[Request], device: torch.device) -> Tensor:
    """Their table on the device, int64: a row for each, then the numbers that no tensor holds."""
    numbers = [x for request in requests for x in request.numbers.values()]
    floats = [x for x in numbers if not isinstance(x, Tensor)]
    floats += [0.0] * (2 - len(floats) % 2)  # whole int64, one at least
    base = len(COLUMNS) * len(requests)
    held = torch.empty(base + len(floats) // 2, dtype=torch.int64, device=device)
    addresses = itertools.count(held.data_ptr() + 8 * base, 4)
    firsts = itertools.accumulate((r.programs for r in requests), initial=0)
    rows = [_row(r, first, addresses) for r, first in zip(requests, firsts, strict=False)]
    tail = _on_host(floats, torch.float32).view(torch.int64)
    host = torch.cat([_on_host(rows, torch.int64).view(-1), tail])
    return held.copy_(host.pin_memory() if device.type == "cuda" else host, non_blocking=True)


def _row(request: Request, first: int, addresses: Iterator[int]) -> list[int]:
    """A row of the table; the request's numbers on the host will be at the next addresses."""
    at = {**request.geometry, "first": first}
    at |= {name: x.data_ptr() for name, x in request.tensors.items()}
    for name, number in request.numbers.items():
        if isinstance(number, Tensor):
            assert number.dtype == torch.float32
            at[name] = number.data_ptr()
        else:
            at[name] = next(addresses)
    assert at.keys() <= set(COLUMNS)
    return [at.get(name, 0) for name in COLUMNS]


def _on_host(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


def constants(requests: Sequence[Request]) -> tuple[dict[str, Any], int]:
    """The constants of a kernel over the parameters of ``requests``, its number of warps."""
    request, kernels = requests[0], _kernels()
    named = dict(request.constants)
    for name in named.keys() & {"FORM", "KEPT"}:
        named[name] = getattr(kernels, named[name])
    for name in named.keys() & {"XD", "WD", "AD"}:
        named[name] = getattr(kernels.tl, named[name])
    named["COUNT"] = max(16, 1 << (len(requests) - 1).bit_length())
    shape, warps = _SHAPES.get(request.kernel, _of_tiles)(request)
    return named | shape, warps


def _of_tiles(request: Request) -> Shape:
    """Of a kernel that reads vectors where its runs are aligned."""
    is_aligned = request.is_aligned
    # each element has an address of its own where there are no vectors: fewer to a thread
    warps = sizes.WARPS if is_aligned else 2 * sizes.WARPS
    return {"TR": sizes.TR, "TC": sizes.TC, "ALIGNED": is_aligned}, warps


def _of_groups(request: Request) -> Shape:
    shape, warps = _of_tiles(request)
    return shape | {"TC": sizes.GROUP}, warps


def _of_sums(request: Request) -> Shape:
    return {"TR": sizes.TR, "TC": sizes.TC}, sizes.WARPS


def _of_statistics(request: Request) -> Shape:
    return {"TC": sizes.LONG}, sizes.LONG_WARPS


def _of_strips(request: Request) -> Shape:
    """Of rows that are as wide as a tile, and read while those before them are summed."""
    named, is_aligned = dict(request.constants), request.is_aligned
    wide = named["TC"]
    # two stages where three would not fit into registers, one where there are no vectors
    fits = named["XD"] != "float32" and wide < sizes.WIDEST
    stages = min(sizes.STAGES, 3 if fits else 2) if is_aligned else 1
    shape = {"TR": min(sizes.WIDE_ROWS, sizes.WIDE_ELEMENTS // wide), "TC": wide}
    shape |= {"ALIGNED": is_aligned, "STRIP": sizes.STRIP, "STAGES": stages}
    return shape, min(sizes.WIDE_WARPS, wide // sizes.WIDE_COLS)


_SHAPES: dict[str, Callable[[Request], Shape]] = {
    "weighed": _of_strips,
    "normalize_whole_rows": _of_strips,
    "factors": _of_statistics,
    "clipped_factors": _of_statistics,
    "mark": _of_groups,
    "mend": _of_groups,
    "mend_unmarked": _of_groups,
    "fold": _of_sums,
}


def _kernels() -> ModuleType:
    """The kernels, imported when first asked for: they take Triton with them."""
    from ds_ext.ops.triton import kernels

    return kernels
