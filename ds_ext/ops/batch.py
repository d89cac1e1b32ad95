"""Many parameters that are stepped as one: pure data, which rules get instead of single tensors.

A ``Batch`` stands where a ``Shard`` does, ``Runs`` and ``Weights`` where a tensor does, and numbers
that each parameter has of its own are vectors [n]. ``executors.tables`` makes the passes.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext.ops.expressions import Source, WeightStorage
from ds_ext.ops.shard import Shard

Pointers: TypeAlias = NDArray[np.int64]
Geometry: TypeAlias = tuple[int, int, int, int, int]  # start, elements, matrices, rows, columns
CPU = torch.device("cpu")
MASTER = frozenset({"master", "marks"})  # the keys of a state that belong to the fp32 master


class Runs:
    """A flat tensor of each parameter of a batch, all of one dtype, wherever each lies.

    Attributes:
        square_parts: of gradients, what adds up to the sums of their squares as a rule reads them,
            where a pass has made this: on a CPU sums over rows.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.square_parts: Any = None

    @functools.cached_property
    def pointers(self) -> Pointers:
        """Where each begins in memory, [n]."""
        return np.array([x.data_ptr() for x in self.tensors], dtype=np.int64)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all."""
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of all."""
        return self.tensors[0].device

    def source(self) -> Source:
        """Describes this to native code and kernels."""
        return Source("IS_RUN", {"x": cast(Tensor, self)})


@dataclass(frozen=True)
class Flat:
    """Numbers of each parameter of a batch, one parameter's after another's in one tensor."""

    values: Tensor  # [total], fp32
    firsts: NDArray[np.int64]  # number of each parameter's first, [n]

    @property
    def pointers(self) -> Pointers:
        """Where each begins in memory, [n]."""
        return 4 * self.firsts + self.values.data_ptr()

    def contiguous(self) -> "Flat":
        """Returns itself, as a tensor does that is contiguous."""
        return self


@dataclass(frozen=True)
class Shifted:
    """Runs that begin further on, by some bytes each."""

    runs: "Runs | Flat"
    by: NDArray[np.int64]  # [n]

    @property
    def pointers(self) -> Pointers:
        """Where each begins in memory, [n]."""
        return self.runs.pointers + self.by


@dataclass(frozen=True)
class Placed:
    """Addresses of what is kept alive beside them."""

    pointers: Pointers  # [n]
    tensors: object


@dataclass(frozen=True)
class Weights:
    """The weights of a batch, and how they are written: as ``WeightStorage``, for each."""

    run: Runs
    how: str = "PLAIN"
    aux: Runs | None = None
    key: NDArray[np.uint32] | None = None  # [n]
    # Room for Σ(Δw²) and Σw² of each: on a CPU fp64, added to; on a GPU fp32, overwritten.
    update_sums: "Runs | Flat | None" = None
    norm_cache: Any = None  # the cached norms of the weights, of the executor

    def storage(self) -> WeightStorage:
        """Describes this to native code and kernels: it has the fields of a ``WeightStorage``."""
        return cast(WeightStorage, self)


class Batch:
    """The geometry of the runs of many parameters of one kind.

    Args:
        shards: one for each parameter; all are matrices cut alike, or all are vectors.
        firsts: the number, in its parameter, of each run's first element, by which its random
            bits are chosen; the start of its shard if not given.
        device: where they lie.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        firsts: Sequence[int] | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.shards, self.device = shards, device
        self.is_matrix, self.holds_rows, self.is_1x1 = kind(shards[0])
        assert all(kind(s) == kind(shards[0]) for s in shards), "a batch of several kinds"
        self.is_whole = all(len(s) == s.numel and s.split is None for s in shards)
        self.row_firsts, self.all_rows = _offsets([s.mats * s.rows for s in shards])
        self.col_firsts, self.all_cols = _offsets([s.mats * s.cols for s in shards])
        self.firsts, self.elements = _offsets([s.numel for s in shards])
        sizes = [(s.numel, s.rows, s.cols) for s in shards]
        sizes_of_each = torch.tensor(sizes, dtype=torch.float32, device=CPU).t().contiguous()
        self.numel, self.rows, self.cols = sizes_of_each.to(device).unbind()
        self.whole_geometries = [(0, s.numel, s.mats, s.rows, s.cols) for s in shards]
        boxes = [_box(s) for s in shards]
        self.geometries = [geometry for geometry, *_ in boxes]
        self.starts = np.array([start for start, *_ in self.geometries], dtype=np.int64)
        self.noise_firsts = [s.start for s in shards] if firsts is None else firsts
        row_skips = np.array([row for _, row, _ in boxes])
        col_skips = np.array([col for *_, col in boxes])
        self.own_row_firsts = self.row_firsts + row_skips
        self.own_col_firsts = self.col_firsts + col_skips
        # Bytes to the first row, and column, that each run may touch, in its statistics.
        self.row_offsets, self.col_offsets = 4 * row_skips, 4 * col_skips

    def __len__(self) -> int:
        return len(self.shards)

    @property
    def cuts(self) -> tuple[range, ...]:
        """Elements that runs start at, of each parameter."""
        return tuple(itertools.chain.from_iterable(s.cuts for s in self.shards))

    @property
    def flat(self) -> "Batch":
        """Itself: passes that need no rows and columns look at none."""
        return self

    def rms(self, square_sum: Any) -> Any:
        """Returns the roots of the mean squares, [n], from sums over whole parameters, [n]."""
        return (square_sum / self.numel).sqrt()


def kind(shard: Shard) -> tuple[bool, bool, bool]:
    """Returns what parameters of one batch have in common; the same on all ranks."""
    return shard.is_matrix, shard.holds_rows, shard.is_1x1


def may_join(shard: Shard) -> bool:
    """Returns whether a parameter may be part of a batch; the same on all ranks."""
    is_one_box = shard.split is None or all(len(boxes) == 1 for boxes in shard.split.boxes)
    return shard.numel > 0 and is_one_box


def stacked(states: Sequence[Mapping[str, Any]], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what rules keep of each, ``parts`` nested in dicts, as one state of ``Runs``."""
    found: dict[str, Any] = {}
    for key, part in parts.items():
        kept = [s[key] for s in states]
        found[key] = stacked(kept, part) if isinstance(part, Mapping) else Runs(kept)
    return found


def _offsets(sizes: list[int]) -> tuple[NDArray[np.int64], int]:
    """Where each of consecutive pieces begins, and the size of all."""
    ends = np.cumsum(np.array(sizes, dtype=np.int64))
    return ends - np.array(sizes, dtype=np.int64), int(ends[-1])


def _box(shard: Shard) -> tuple[Geometry, int, int]:
    """Start, elements, matrices, rows and columns of a run as that of a matrix of its own, and
    the first row and column of that in the whole one.
    """
    if shard.split is None:
        return (shard.start, len(shard), shard.mats, shard.rows, shard.cols), 0, 0
    for box, start, stop in shard.pieces():
        return (start, stop - start, 1, box.rows, box.cols), box.row, box.col
    return (0, 0, 1, shard.rows, shard.cols), 0, 0
