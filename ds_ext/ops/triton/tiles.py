"""How a run is divided into tiles: the geometry of a parameter's row of the table."""

from dataclasses import dataclass

from ds_ext.ops.shard import Shard
from ds_ext.ops.triton import sizes


@dataclass(frozen=True)
class Tiles:
    """One tile for each program, and the columns of the table that say where they lie."""

    programs: int
    geometry: dict[str, int]


def flat(shard: Shard) -> Tiles:
    """A run as rows of one tile's width, whatever its matrices are."""
    rows = -(-len(shard) // sizes.TC)
    down = -(-rows // sizes.TR)
    at = {"start": 0, "n": len(shard), "origin": shard.start, "mat0": 0, "row0": 0}
    return Tiles(down, at | {"rows": rows, "cols": sizes.TC, "down": down})


def by_matrix(shard: Shard) -> Tiles:
    """A run as tiles of the matrices it touches."""
    at = _by_rows(shard, sizes.TR)
    mats = touched(shard)
    return Tiles(mats * at["down"] * across(shard), at | {"height": mats * at["down"] * sizes.TR})


def by_strip(shard: Shard) -> Tiles:
    """A run as strips of whole rows of the matrices it touches."""
    at = _by_rows(shard, sizes.STRIP)
    return Tiles(touched(shard) * at["down"], at)


def by_group(n: int) -> Tiles:
    """A run [n] as rows of the elements that share a mark."""
    programs = -(-n // (sizes.GROUP * sizes.TR))
    return Tiles(programs, {"start": 0, "n": n, "cols": sizes.GROUP})


def _by_rows(shard: Shard, height: int) -> dict[str, int]:
    """The geometry of tiles that are so many rows high."""
    at = {"start": shard.start, "n": len(shard), "rows": shard.rows, "cols": shard.cols}
    if not len(shard):
        return at | {"mat0": 0, "row0": 0, "down": 0}
    first, last = shard.start // shard.cols, (shard.stop - 1) // shard.cols
    row0, rows = 0, shard.rows
    if touched(shard) == 1:  # only the rows that the run has
        row0, rows = first % shard.rows, last - first + 1
    return at | {"mat0": first // shard.rows, "row0": row0, "down": -(-rows // height)}


def across(shard: Shard) -> int:
    """How many tiles lie side by side."""
    return -(-shard.cols // sizes.TC)


def touched(shard: Shard) -> int:
    """How many matrices a run touches."""
    size = shard.rows * shard.cols
    return (shard.stop - 1) // size - shard.start // size + 1 if len(shard) else 0


def alone(shard: Shard) -> tuple[Shard, slice, slice]:
    """A run as that of a matrix of its own, and the rows and columns which that is of the whole.

    So that a kernel need not know of the box that a rank of tensor parallelism holds.
    """
    if shard.split is None:
        return shard, slice(None), slice(None)
    for box, start, stop in shard.pieces():
        rows, cols = (slice(at, at + n) for at, n in (box[:2], box[2:]))
        return Shard((box.rows, box.cols), start, stop, shard.size), rows, cols
    return Shard((shard.rows, shard.cols), 0, 0, 1), slice(None), slice(None)
