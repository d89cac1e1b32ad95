"""Many parameters that are stepped as one: pure data, which rules get instead of single tensors.

A ``Batch`` replaces a ``Shard``, ``Runs`` replace a tensor, and vectors [n] replace
numbers of one parameter. ``passes`` of a batch are the passes over its runs.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext.ops.executors.reference import Reference
from ds_ext.ops.expressions import root
from ds_ext.ops.runs import Runs
from ds_ext.ops.schema import SCALE_GROUP
from ds_ext.ops.shard import Block, Shard
from ds_ext.ops.state import Parts, State

GeometryTuple: TypeAlias = tuple[int, int, int, int, int]  # start, elements, matrices, rows, cols
CPU = torch.device("cpu")


class Batch:
    """The geometry of the runs of many parameters of one kind, with the passes over them.

    Args:
        shards: one for each parameter; all of the same ``geometry_class``.
        firsts: the index of each run's first element in its parameter, from which its random bits
            count; by default the start of its shard.
        device: the device of the runs.
    """

    passes: Reference

    def __init__(
        self,
        shards: Sequence[Shard],
        firsts: Sequence[int] | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.shards, self.device = shards, device
        kinds = set(map(geometry_class, shards))
        assert len(kinds) == 1, "a batch of several kinds"
        self.is_matrix, self.holds_rows = kinds.pop()
        # The elements of each parameter's tensors: statistics, runs, groups of their 8-bit moments.
        self.row_sizes = tuple(s.mats * s.rows for s in shards)
        self.col_sizes = tuple(s.mats * s.cols for s in shards)
        self.run_sizes = tuple(len(s) for s in shards)
        self.group_sizes = tuple(-(-n // SCALE_GROUP) for n in self.run_sizes)
        self.row_firsts, self.all_rows = _offsets(self.row_sizes)
        self.col_firsts, self.all_cols = _offsets(self.col_sizes)
        sizes = [(s.numel, s.rows, s.cols) for s in shards]
        sizes_of_each = torch.tensor(sizes, dtype=torch.float32, device=CPU).t().contiguous()
        self.numel, self.rows, self.cols = sizes_of_each.to(device).unbind()
        self.whole_geometries = [(0, s.numel, s.mats, s.rows, s.cols) for s in shards]
        boxes = [_box(s) for s in shards]
        self.geometries = [geometry for geometry, *_ in boxes]
        self.noise_firsts = [s.start for s in shards] if firsts is None else firsts
        row_skips = np.array([row for _, row, _ in boxes])
        col_skips = np.array([col for *_, col in boxes])
        self.own_row_firsts = self.row_firsts + row_skips
        self.own_col_firsts = self.col_firsts + col_skips
        # Offset in the statistics of the first row, and column, that each run may touch; bytes.
        self.row_offsets, self.col_offsets = 4 * row_skips, 4 * col_skips

    def __len__(self) -> int:
        return len(self.shards)

    @functools.cached_property
    def starts(self) -> NDArray[np.int64]:
        """The elements at which runs start, of all parameters."""
        return np.unique(np.concatenate([s.starts for s in self.shards]))

    @functools.cached_property
    def row_owners(self) -> tuple[Tensor, Tensor]:
        """For each row of the row statistics: its parameter, and √cols."""
        return self._owners(self.row_sizes, self.cols)

    @functools.cached_property
    def col_owners(self) -> tuple[Tensor, Tensor]:
        """For each column of the column statistics: its parameter, and √rows."""
        return self._owners(self.col_sizes, self.rows)

    def _owners(self, counts: tuple[int, ...], sizes: Tensor) -> tuple[Tensor, Tensor]:
        owners = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(self.device)
        return owners, root(sizes[owners])

    def blocks(self, limit: int | None = None) -> Iterator[Block]:
        """Raises TypeError: only a run of one parameter has blocks."""
        raise TypeError(
            "ops.blocks and ops.evaluate read one parameter, and no batch. "
            "Register the rule with is_batched=False, and its parameters are stepped one by one."
        )

    @property
    def flat(self) -> "Batch":
        """Itself: passes over flat runs ignore rows and columns."""
        return self

    def rms(self, square_sum: Tensor) -> Tensor:
        """Returns the root mean squares, [n], from sums of squares over whole parameters, [n]."""
        return (square_sum / self.numel).sqrt()


def geometry_class(shard: Shard) -> tuple[bool, bool]:
    """Returns the properties that parameters of one batch share; the same on all ranks."""
    return shard.is_matrix, shard.holds_rows


def may_join(shard: Shard) -> bool:
    """Returns whether a parameter may be part of a batch; the same on all ranks."""
    is_one_box = shard.split is None or all(len(boxes) == 1 for boxes in shard.split.boxes)
    return shard.numel > 0 and is_one_box


def stacked(states: Sequence[State], parts: Parts) -> State:
    """Returns the states of several parameters, which have ``parts``, as one state of ``Runs``."""
    found: State = {}
    for key, part in parts.items():
        kept = [s[key] for s in states]
        found[key] = stacked(kept, part) if isinstance(part, Mapping) else Runs(kept)
    return found


def _offsets(sizes: tuple[int, ...]) -> tuple[NDArray[np.int64], int]:
    """The offsets of consecutive pieces, and their total size."""
    ends = np.cumsum(sizes, dtype=np.int64)
    return ends - sizes, int(ends[-1])


def _box(shard: Shard) -> tuple[GeometryTuple, int, int]:
    """The geometry of a run within its box, and the box's first row and column in the matrix."""
    if shard.split is None:
        return (shard.start, len(shard), shard.mats, shard.rows, shard.cols), 0, 0
    for box, start, stop in shard.pieces():
        return (start, stop - start, 1, box.rows, box.cols), box.row, box.col
    return (0, 0, 1, shard.rows, shard.cols), 0, 0
