"""Geometry of the run ``[start, stop)`` of a flattened parameter that one rank owns. No torch."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

T = TypeVar("T")  # a number, or a tensor of them

# Elements of a block of a run: large enough to amortize a call, small enough for the cache.
BLOCK = 2**19
WIDEST = 2**14  # the most columns of a matrix whose whole rows a program of a kernel holds


@dataclass(frozen=True)
class Block:
    """A box of a parameter seen as ``[matrices, rows, cols]``, contiguous within a run."""

    run: slice  # its elements, counted from the start of the run
    mats: slice
    rows: slice
    cols: slice

    @functools.cached_property
    def shape(self) -> tuple[int, int, int]:
        """Matrices, rows and columns of the box."""
        return (
            self.mats.stop - self.mats.start,
            self.rows.stop - self.rows.start,
            self.cols.stop - self.cols.start,
        )


class Box(NamedTuple):
    """A part of a matrix that is contiguous in memory, row after row; a vector is one row."""

    row: int  # first row
    rows: int
    col: int  # first column
    cols: int

    @property
    def numel(self) -> int:
        """The number of elements of the box."""
        return self.rows * self.cols


@dataclass(frozen=True)
class TensorParallelSplit:
    """The boxes of a parameter that each rank of tensor parallelism holds.

    A rank's boxes lie one after another; a divided fused QKV has several. The rank's elements are
    then cut into equal runs for ``ranks`` ranks of data parallelism.
    """

    boxes: tuple[tuple[Box, ...], ...]
    ranks: int = 1
    # by run, the rank that has it in the group that adds up sums; None: runs are in their order
    order: tuple[int, ...] | None = None

    def first(self, part: int) -> int:
        """The index of a rank's first element; the elements of all ranks are concatenated."""
        return sum(map(self.numel, range(part)))

    def numel(self, part: int) -> int:
        """The number of elements that a rank of tensor parallelism holds."""
        return sum(box.numel for box in self.boxes[part])

    @functools.cached_property
    def run_starts(self) -> tuple[int, ...]:
        """The element at which the run of each rank starts, by run."""
        starts = []
        for i in range(len(self.boxes)):
            first, n = self.first(i), self.numel(i)
            size = -(-n // self.ranks)
            starts += [first + min(j * size, n) for j in range(self.ranks)]
        return tuple(starts)


def outward(start: int, stop: int, unit: int, total: int) -> slice:
    """The whole units that ``[start, stop)`` touches, limited to ``total`` elements."""
    if start == stop:
        return slice(start, start)
    return slice(start // unit * unit, min(-(-stop // unit) * unit, total))


def groups_of(run: slice, size: int) -> slice:
    """The indices of the groups of ``size`` elements that make up a run; the last may be short."""
    first = run.start // size
    return slice(first, -(-run.stop // size) if run.start < run.stop else first)


@dataclass(frozen=True)
class Shard:
    """One rank's run ``[start, stop)`` of a parameter of ``shape`` flattened in row-major order.

    The last two dimensions are a matrix, and the leading ones count matrices. A vector is one row.
    A rank without elements has ``start == stop``.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    size: int  # of a full run: cuts are its multiples, unless ``split`` or ``cut_at`` is given
    split: TensorParallelSplit | None = None  # if given, elements count box by box, not row by row
    cut_at: tuple[int, ...] | None = None  # if given, the elements at which ranks' runs start
    turn: int = 0  # which of the ranks with a run does the work of one rank: ``has_turn``

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop <= self.numel, f"{self} lies outside its parameter"

    @classmethod
    @functools.lru_cache(4096)
    def whole(cls, shape: tuple[int, ...]) -> "Shard":
        """The run of a process that holds the whole parameter; the same object for a shape."""
        numel = math.prod(shape)
        return cls(tuple(shape), 0, numel, numel)

    @classmethod
    @functools.lru_cache(4096)
    def of_rank(cls, shape: tuple[int, ...], rank: int, world: int) -> "Shard":
        """The run of a ZeRO rank: ``ceil(numel / world)`` elements, the last runs short or empty.

        The same arguments give the same object.
        """
        numel = math.prod(shape)
        size = -(-numel // world)
        return cls(tuple(shape), min(rank * size, numel), min((rank + 1) * size, numel), size)

    @classmethod
    def of_split(
        cls, shape: tuple[int, ...], split: TensorParallelSplit, part: int, rank: int
    ) -> "Shard":
        """The run of data parallelism's ``rank`` in the boxes of tensor parallelism's ``part``."""
        first, n = split.first(part), split.numel(part)
        size = -(-n // split.ranks)
        start, stop = (first + min(i * size, n) for i in (rank, rank + 1))
        return cls(tuple(shape), start, stop, size, split)

    @functools.cached_property
    def numel(self) -> int:
        """The number of elements of the whole parameter, without padding."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def run_starts(self) -> range | tuple[int, ...]:
        """The element at which each run starts; runs may be empty."""
        if self.split is not None:
            return self.split.run_starts
        return range(0, self.numel, self.size or 1) if self.cut_at is None else self.cut_at

    @functools.cached_property
    def flat(self) -> "Shard":
        """The same run of a vector, for passes that ignore rows and columns.

        Do not use its ``starts`` if this shard has ``split`` or ``cut_at``.
        """
        return Shard((self.numel,), self.start, self.stop, self.size)

    @functools.cached_property
    def turnless(self) -> "Shard":
        """The same run with turn 0, for passes, whose work no rank does for others."""
        return replace(self, turn=0) if self.turn else self

    @property
    def starts(self) -> tuple[int, ...]:
        """The elements at which runs with elements start, in order, beginning with 0."""
        return tuple(start for start, _ in self._run_by_rank.values()) or (0,)

    @property
    def has_turn(self) -> bool:
        """Whether this rank does the work that only one of the ranks with a run needs to do.

        If every rank has the whole parameter, each rank does it.
        """
        return len(self) > 0 and self.start == self.starts[self.turn % len(self.starts)]

    @property
    def _run_by_rank(self) -> dict[int, tuple[int, int]]:
        return _runs(self.run_starts, self.numel, None if self.split is None else self.split.order)

    @property
    def ranks_with_runs(self) -> tuple[int, ...]:
        """The ranks that have elements, in the order of these. See ``run_of``."""
        return tuple(self._run_by_rank)

    @property
    def owner(self) -> int:
        """The rank for which ``has_turn`` holds. See ``run_of``."""
        return self.ranks_with_runs[self.turn % len(self.ranks_with_runs)]

    def run_of(self, rank: int) -> tuple[int, int]:
        """Returns where a rank's run starts and stops; ``rank`` counts in the group of sums."""
        return self._run_by_rank.get(rank, (0, 0))

    @functools.cached_property
    def is_cut(self) -> bool:
        """Whether more than one rank may have elements of the parameter; the same on all ranks."""
        return len(self._run_by_rank) > 1

    @functools.cached_property
    def is_matrix(self) -> bool:
        """Whether the parameter has at least two dimensions."""
        return len(self.shape) >= 2

    @functools.cached_property
    def statistics(self) -> int:
        """The number of row and column sums of the parameter."""
        return self.mats * (self.rows + self.cols)

    @functools.cached_property
    def holds_rows(self) -> bool:
        """Whether every run, and every block of it, has whole rows, of up to ``WIDEST`` columns."""
        if not self.is_matrix or not 0 < self.cols <= WIDEST:
            return False
        if self.split is not None and any(
            box.cols != self.cols for boxes in self.split.boxes for box in boxes if box.numel
        ):
            return False
        return all(at % self.cols == 0 for at in self.starts)

    @functools.cached_property
    def mats(self) -> int:
        """The number of matrices, the product of the leading dimensions."""
        return math.prod(self.shape[:-2])

    @functools.cached_property
    def rows(self) -> int:
        """The rows of a matrix; 1 for a vector."""
        return self.shape[-2] if self.is_matrix else 1

    @functools.cached_property
    def cols(self) -> int:
        """The columns of a matrix; the elements of a vector."""
        return self.shape[-1] if self.is_matrix else self.numel

    def rms(self, square_sum: T) -> T:
        """Root of the mean square, from a sum of squares over the whole parameter."""
        return (square_sum / max(1, self.numel)) ** 0.5  # type: ignore[no-any-return, operator]

    def pieces(self) -> Iterator[tuple[Box, int, int]]:
        """Yields the boxes that the run touches, each with the run's start and stop in it.

        Without a split, all matrices of a parameter are one box.
        """
        if self.split is None:
            if len(self):
                yield Box(0, self.mats * self.rows, 0, self.cols), self.start, self.stop
            return
        first = 0
        for box in itertools.chain(*self.split.boxes):
            start, stop = max(self.start - first, 0), min(self.stop - first, box.numel)
            if start < stop:
                yield box, start, stop
            first += box.numel

    @functools.cached_property
    def touched(self) -> slice:
        """The smallest range of rows that contains the run, counted through all matrices."""
        rows = [
            (box.row + start // box.cols, box.row - (-stop // box.cols))
            for box, start, stop in self.pieces()
        ]
        if not rows:
            at = self.start // self.cols if self.cols else 0
            return slice(at, at)
        return slice(min(low for low, _ in rows), max(high for _, high in rows))

    def blocks(self, limit: int | None = None) -> Iterator[Block]:
        """Cuts the run, in order, into boxes of at most ``limit`` elements (default ``BLOCK``)."""
        limit = limit or BLOCK
        done = 0
        for box, at, stop in self.pieces():
            while at < stop:
                row, col = divmod(at, box.cols)
                mat, row = divmod(box.row + row, self.rows)
                left = min(stop - at, limit)
                mats, rows, cols = 1, 1, box.cols
                if col or left < box.cols:  # part of a row
                    cols = min(left, box.cols - col)
                elif row or left < self.rows * box.cols:  # whole rows of one matrix
                    rows = min(left // box.cols, self.rows - row)
                else:  # whole matrices
                    rows, mats = self.rows, left // (self.rows * box.cols)
                n = mats * rows * cols
                yield Block(
                    slice(done, done + n),
                    slice(mat, mat + mats),
                    slice(row, row + rows),
                    slice(box.col + col, box.col + col + cols),
                )
                at, done = at + n, done + n


@functools.lru_cache(4096)
def _runs(
    starts: range | tuple[int, ...], numel: int, order: tuple[int, ...] | None
) -> dict[int, tuple[int, int]]:
    """By rank that has elements, in the order of these: the start and stop of its run."""
    runs = zip(starts, (*starts[1:], numel), strict=False)
    return {
        i if order is None else order[i]: (start, stop)
        for i, (start, stop) in enumerate(runs)
        if start < stop
    }


class Section(NamedTuple):
    """A matrix within a parameter: consecutive elements, as an expert of a stack, or some rows."""

    shape: tuple[int, ...]
    first: int  # its first element

    def before(self, at: int) -> int:
        """Returns how many of the parameter's first ``at`` elements lie in the section."""
        return min(max(at - self.first, 0), math.prod(self.shape))

    def place(self, whole: Shard) -> slice:
        """Returns where the section's elements lie in a run of the parameter."""
        n = self.before(whole.stop) - self.before(whole.start)
        start = max(self.first - whole.start, 0) if n else 0
        return slice(start, start + n)

    def shard(self, whole: Shard, turn: int = 0) -> Shard:
        """Returns which elements of the section lie in a run of the parameter.

        Args:
            whole: the run. Tensor parallelism has not divided the parameter.
            turn: the number of the section in its parameter.
        """
        assert whole.split is None, "a section of boxes"
        cut_at = tuple(map(self.before, whole.run_starts))
        start, stop = self.before(whole.start), self.before(whole.stop)
        return Shard(self.shape, start, stop, whole.size, cut_at=cut_at, turn=whole.turn + turn)


@functools.lru_cache(4096)
def divided(sections: tuple[Section, ...], whole: Shard) -> tuple[tuple[slice, Shard], ...]:
    """Returns, for each section, the slice of its elements in a run, and its shard."""
    return tuple((x.place(whole), x.shard(whole, turn)) for turn, x in enumerate(sections))
