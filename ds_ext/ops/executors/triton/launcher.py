"""Launches of kernels over many parameters: their tiles, tables and sums."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext.ops import schema
from ds_ext.ops.executors.triton import folds, tiles
from ds_ext.ops.executors.triton.columns import AT, FORMULAS, NUMBERS
from ds_ext.ops.executors.triton.folds import Fold, Parts
from ds_ext.ops.executors.triton.launch_queue import LaunchQueue
from ds_ext.ops.executors.triton.launches import Constants, HostNumber, Launch, Spec
from ds_ext.ops.executors.triton.memory import Addresses, Memory
from ds_ext.ops.executors.triton.norm_cache import DeviceNormCache
from ds_ext.ops.executors.triton.tiles import Geometry, Int64s, Tiles
from ds_ext.ops.formulas import Formula

Columns = Mapping[str, Any]
# The columns of runs that are read in vectors, and of those that are written too.
VECTORS, OUT = slice(AT["x"], AT["aux"] + 1), slice(AT["x"], AT["out"] + 1)
OF_WIDE_ROWS = {
    "weighted_sums": "wide_weighted_sums",
    "normalize_whole_rows": "normalize_wide_rows",
}


@dataclass(frozen=True)
class SquareParts:
    """Int64s that a pass leaves of each parameter, which add up to its sum of squares."""

    at: Any  # has ``pointers`` to them, [n]
    tiles: Tiles  # of what adds them up


@dataclass(frozen=True)
class GradLimits:
    """A number of each gradient of a batch that only the device knows, and its limit.

    Attributes:
        found: has ``pointers`` to the numbers, [n]: fp32, such as sums of squares or votes.
        most: the largest numbers of good gradients, [n]; NaN is bad.
    """

    found: Any
    most: NDArray[np.float32]


class Launcher:
    """Many parameters on a GPU, and launches of kernels over them.

    Args:
        geometries: start, elements, matrices, rows and columns of each run.
        firsts: the number, in its parameter, of each run's first element.
        device: where they lie.

    Attributes:
        queue: collects the passes of a bucket's step; None: each pass is launched at once.
        limits: by which programs skip parameters with bad gradients; None: all are good.
    """

    queue: LaunchQueue | None = None
    limits: GradLimits | None = None

    def __init__(
        self,
        geometries: Sequence[tuple[int, int, int, int, int]],
        firsts: Sequence[int],
        device: torch.device,
    ) -> None:
        self.device, self.n = device, len(geometries)
        start, n, mats, rows, cols = np.array(geometries, dtype=np.int64).T
        first = np.array(firsts, dtype=np.int64)
        self.geometry = Geometry(start, n, mats, rows, cols, first)

    def ask(
        self, launches: Iterable[Launch], folds: Iterable[Launch] = (), only_sums: bool = False
    ) -> None:
        """Adds a pass to the queue, or launches it: see ``LaunchQueue.add``."""
        queue = self.queue or LaunchQueue(Memory(self.device))
        queue.add(launches, folds, only_sums)
        if self.queue is None:
            queue.launch()

    @property
    def _memory(self) -> Memory:
        return Memory(self.device) if self.queue is None else self.queue.memory

    def added_up(self, squares: SquareParts) -> Tensor:
        """Returns the sums of what passes have left, [n]."""
        total = self.zeros(self.n)
        outs = Addresses(total, 4 * np.arange(self.n)).pointers
        own = np.arange(self.n)
        launch = self._fold(squares.tiles, own, squares.at.pointers, outs, [squares.at, total])
        self.ask((), [launch])
        return total

    def tell(self, limits: GradLimits, out: Addresses) -> None:
        """Copies the number of each parameter to ``out``."""
        columns = {"found": limits.found, "out": out}
        self.ask(self.launches("tell", (), self.by_parameter, columns))

    def scratch(self, n: int) -> Tensor:
        """Returns memory for n numbers, [n] in fp32."""
        return self._memory.scratch(n)

    def zeros(self, n: int) -> Tensor:
        """Returns sums of nothing yet, [n] in fp32."""
        return self._memory.sums(n)

    @functools.cached_property
    def flat(self) -> Tiles:
        """Tiles of passes that need no rows and columns."""
        return tiles.flat(self.geometry)

    @functools.cached_property
    def by_matrix(self) -> Tiles:
        """Tiles of passes that do."""
        return tiles.by_matrix(self.geometry)

    @functools.cached_property
    def by_strip(self) -> Tiles:
        """Tiles that are as wide as the rows."""
        return tiles.by_strip(self.geometry)

    def new_norm_cache(self) -> DeviceNormCache:
        """Returns a cache of the norms of new weights, which lasts from step to step."""
        return DeviceNormCache({name: parts for name, (parts, _) in self.sums.items()}, self.device)

    @functools.cached_property
    def recalled(self) -> dict[str, Tiles]:
        """A program for each parameter, which looks through tiles of these names."""
        return {"flat": _looked_through(self.flat), "by_matrix": _looked_through(self.by_matrix)}

    @functools.cached_property
    def by_group(self) -> Tiles:
        """Tiles of elements that share marks."""
        return tiles.by_group(self.geometry)

    @functools.cached_property
    def by_parameter(self) -> Tiles:
        """A tile for each parameter."""
        return tiles.by_parameter(self.geometry)

    @functools.cached_property
    def sums(self) -> dict[str, tuple[Parts, Fold]]:
        """How sums over all elements are added up, by the tiles that leave parts of them."""
        of = {"flat": self.flat, "by_matrix": self.by_matrix}
        return {name: folds.of_tiles(at.programs) for name, at in of.items()}

    @functools.cached_property
    def sums_of_tiles(self) -> tuple[tuple[Parts, Fold], tuple[Parts, Fold]]:
        """How sums over rows, and over columns, are added up of tiles'."""
        g, at = self.geometry, self.by_matrix
        return folds.row_sums(g, at), folds.col_sums(g, at)

    @functools.cached_property
    def sums_of_strips(self) -> tuple[Parts, Fold]:
        """How sums over columns are added up of strips'."""
        return folds.col_sums(self.geometry, self.by_strip)

    @functools.cached_property
    def squares_of_tiles(self) -> Tiles:
        """How sums over rows of tiles are added up to one."""
        at = self.by_matrix
        return folds.of_one(at.of("height") * tiles.across(self.geometry))

    @functools.cached_property
    def squares_of_rows(self) -> Tiles:
        """How sums over whole rows are added up to one."""
        return folds.of_one(self.geometry.mats * self.geometry.rows)

    def launches(
        self,
        kernel: str,
        constants: Constants,
        at: Tiles,
        columns: Columns,
        vectors: slice = VECTORS,
    ) -> Iterator[Launch]:
        """A kernel over all parameters: one launch of those with vectors, one of the others.

        If tiles are as wide as rows, there is one launch for each width, and another kernel for
        rows that are wider than tiles: a parameter's bits must not depend on its neighbours.
        """
        constants = (*constants, ("JUDGED", self.limits is not None))
        if self.limits is not None:
            columns = {**columns, "found": self.limits.found, "most": self.limits.most}
        rows, numbers, formulas = self._filled(at, columns)
        alive = list(columns.values())
        for kind, own in at.kinds(rows[:, vectors]):
            rows_of, programs, some, chosen = rows, at.programs, numbers, None
            if len(own) < self.n:
                rows_of, programs, chosen = rows[own], programs[own], own
                some = {k: x if isinstance(x, float) else x[own] for k, x in numbers.items()}
            named: Constants = tuple((k, formulas.get(k, value)) for k, value in constants)
            if kind.aligned is not None:
                named = (*named, ("ALIGNED", kind.aligned))
            name = kernel
            if kind.width:
                named = (*named, ("TC", kind.width))
            elif at.widths is not None:
                name = OF_WIDE_ROWS[kernel]
            yield Launch(name, named, at, chosen, rows_of, programs, some, alive)

    def _filled(
        self, at: Tiles, columns: Columns
    ) -> tuple[Int64s, dict[str, HostNumber], dict[str, Spec]]:
        """The rows of a table, the numbers of columns that the host has, formulas of others."""
        rows = at.rows.copy()
        numbers: dict[str, HostNumber] = {}
        formulas: dict[str, Spec] = {}
        given: list[Tensor | float] = []
        for name, value in columns.items():
            if hasattr(value, "pointers"):
                rows[:, AT[name]] = value.pointers
            elif name not in NUMBERS:
                rows[:, AT[name]] = value
            elif isinstance(value, Formula):
                formulas[FORMULAS[name]] = _spec(value.taken_apart(given))
            elif isinstance(value, float | int | np.ndarray):
                numbers[name] = value if isinstance(value, np.ndarray) else float(value)
            else:
                rows[:, AT[name]] = self._addresses(value)
        assert len(given) <= schema.GIVEN, "a formula of more numbers than a pass takes"
        for i, value in enumerate(given):
            if isinstance(value, Tensor):
                rows[:, AT[f"given{i}"]] = self._addresses(value)
            else:
                numbers[f"given{i}"] = float(value)
        return rows, numbers, formulas

    def _addresses(self, number: Tensor) -> Int64s | int:
        """Where a number is, of each parameter or of all."""
        assert number.dtype == torch.float32 and number.is_contiguous()
        first = number.data_ptr()
        return first + 4 * np.arange(self.n) if number.numel() == self.n else first

    def folded(self, how: tuple[Parts, Fold], part: Tensor, out: Any) -> Launch:
        """The launch that adds up ``part`` to what has the addresses of ``out``."""
        fold = how[1]
        parts = part.data_ptr() + fold.parts
        outs = out.pointers[fold.owners].astype(np.int64) + fold.outs
        return self._fold(fold.tiles, fold.owners, parts, outs, [part, out])

    def _fold(
        self, at: Tiles, owners: Int64s, parts: Int64s, outs: Int64s, alive: list[object]
    ) -> Launch:
        """The launch that adds up numbers of ``owners`` among the parameters."""
        rows, numbers, limits = at.rows.copy(), {}, self.limits
        rows[:, AT["part"]], rows[:, AT["out"]] = parts, outs
        if limits is not None:
            rows[:, AT["found"]] = limits.found.pointers[owners]
            numbers["most"] = limits.most[owners]
            alive.append(limits)
        constants: Constants = (("JUDGED", limits is not None),)
        return Launch("fold", constants, at, None, rows, at.programs, numbers, alive)

    def room(self, how: tuple[Parts, Fold]) -> tuple[Tensor, Addresses]:
        """Memory for what tiles leave, and where each parameter's is."""
        part = self.scratch(how[0].total)
        return part, Addresses(part, how[0].starts)


@functools.cache
def _spec(structure: Any) -> Spec:
    """A formula without its numbers, as ``Formula.taken_apart`` gives it, for a kernel."""
    name, *of = structure
    if name != "given":
        of = [*map(_spec, of)]
    return Spec(name=name, **dict(zip("abc", [*of, None, None], strict=False)))


def _looked_through(at: Tiles) -> Tiles:
    """One program for all tiles of a parameter."""
    rows = at.rows.copy()
    rows[:, AT["total"]] = at.programs
    return replace(at, rows=rows, programs=np.ones_like(at.programs))
