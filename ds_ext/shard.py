"""Geometry of the run ``[start, stop)`` of a flattened parameter that one rank owns. No torch."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

# Elements of one scratch block: large enough to hide the cost of a call, small enough for a cache.
BLOCK = 2**19


@dataclass(frozen=True)
class Block:
    """A box of a parameter seen as ``[matrices, rows, cols]``, contiguous within a run."""

    run: slice  # where its elements lie, counted from the start of the run
    mats: slice
    rows: slice
    cols: slice

    @functools.cached_property
    def shape(self) -> tuple[int, int, int]:
        return (
            self.mats.stop - self.mats.start,
            self.rows.stop - self.rows.start,
            self.cols.stop - self.cols.start,
        )


def outward(start: int, stop: int, unit: int, total: int) -> slice:
    """The least whole units, of ``total`` elements, that ``[start, stop)`` touches."""
    if start == stop:
        return slice(start, start)
    return slice(start // unit * unit, min(-(-stop // unit) * unit, total))


@dataclass(frozen=True)
class Shard:
    """One rank's run ``[start, stop)`` of a parameter of ``shape`` flattened in row-major order.

    The last two dimensions are a matrix and the leading ones count matrices; a parameter with
    fewer than two dimensions is one row. A rank without elements has ``start == stop``.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    size: int  # of a full run: the parameter is cut at multiples of it
    before: int = 0  # elements of a stack before this one of it; the multiples are the stack's

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop <= self.numel, f"{self} lies outside its parameter"

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Shard":
        """The run of a process that holds the parameter alone."""
        numel = math.prod(shape)
        return cls(tuple(shape), 0, numel, numel)

    @classmethod
    def of_rank(cls, shape: tuple[int, ...], rank: int, world: int) -> "Shard":
        """ZeRO's cut: equal runs of ``ceil(numel / world)``, the last ones short or empty."""
        numel = math.prod(shape)
        size = -(-numel // world)
        return cls(tuple(shape), min(rank * size, numel), min((rank + 1) * size, numel), size)

    @functools.cached_property
    def numel(self) -> int:
        """Elements of the whole parameter; padding is never among them."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def cuts(self) -> range:
        """Elements that a run starts at, other than the first."""
        size = self.size or 1
        return range(size - self.before % size, self.numel, size)

    @functools.cached_property
    def is_matrix(self) -> bool:
        return len(self.shape) >= 2

    @functools.cached_property
    def holds_rows(self) -> bool:
        """Whether every rank's run, and every block of it, is whole rows of a matrix."""
        if not self.is_matrix or not 0 < self.cols <= BLOCK:
            return False
        return all(at % self.cols == 0 for at in self.cuts)

    @functools.cached_property
    def mats(self) -> int:
        return math.prod(self.shape[:-2])

    @functools.cached_property
    def rows(self) -> int:
        return self.shape[-2] if self.is_matrix else 1

    @functools.cached_property
    def cols(self) -> int:
        return self.shape[-1] if self.is_matrix else self.numel

    def rms(self, square_sum):
        """Root of the mean square, from a sum of squares over the whole parameter."""
        return (square_sum / self.numel) ** 0.5

    def blocks(self, limit: int | None = None) -> Iterator[Block]:
        """Cuts the run, in order, into boxes of at most ``limit`` elements, None for ``BLOCK``."""
        limit = limit or BLOCK
        at = self.start
        while at < self.stop:
            row, col = divmod(at, self.cols)
            mat, row = divmod(row, self.rows)
            room = min(self.stop - at, limit)
            mats, rows, cols = 1, 1, self.cols
            if col or room < self.cols:  # part of a row
                cols = min(room, self.cols - col)
            elif row or room < self.rows * self.cols:  # whole rows of one matrix
                rows = min(room // self.cols, self.rows - row)
            else:  # whole matrices
                rows, mats = self.rows, room // (self.rows * self.cols)
            end = at + mats * rows * cols
            yield Block(
                slice(at - self.start, end - self.start),
                slice(mat, mat + mats),
                slice(row, row + rows),
                slice(col, col + cols),
            )
            at = end
