"""How partial sums of a pass, which each tile leaves, are added up afterwards."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from ds_ext.ops.triton import sizes
from ds_ext.ops.triton.request import Request


def fold(part: Tensor, out: Tensor) -> Request:
    """Sums [k, n or more], or [k] that are one sum, over k -> out [n], or [1]."""
    n, k, stride = out.numel(), len(part), part.stride(0)
    if stride == 1:  # many numbers for one sum
        wide = sizes.TC
        at = {"rows": -(-k // wide), "cols": wide, "n": wide, "height": k, "total": 1}
    else:
        at = {"rows": k, "cols": stride, "n": n, "height": k * stride}
    return Request("fold", (), -(-n // sizes.TC), at, {"part": part, "out": out}, {})


def over_columns(part: Tensor, out: Tensor, at: Mapping[str, int]) -> Iterator[Request]:
    """Sums over each row: [tiles across, mats, rows of a matrix's tiles] -> out [mats, rows].

    ``at`` is the geometry of the pass: the matrices of ``out`` that it has, and their rows.
    """
    _, mats, height = part.shape
    rows = slice(at["row0"], at["row0"] + height)
    for i in range(mats):
        yield fold(part[:, i], out[at["mat0"] + i, rows])


def over_rows(part: Tensor, out: Tensor, at: Mapping[str, int]) -> Iterator[Request]:
    """Sums over each column: [mats, tiles down, cols] -> out [mats, cols]."""
    for i in range(len(part)):
        yield fold(part[i], out[at["mat0"] + i])
