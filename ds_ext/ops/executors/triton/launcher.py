"""Launches of kernels over many parameters: their tiles, tables and sums."""

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext.ops import schema
from ds_ext.ops.batch import PointerArray
from ds_ext.ops.executors.triton import folds, sizes, tiles
from ds_ext.ops.executors.triton.columns import AT, COLUMNS, FORMULAS, NUMBERS
from ds_ext.ops.executors.triton.device_norm_cache import DeviceNormCache
from ds_ext.ops.executors.triton.folds import PartialOffsets, PartialReduction
from ds_ext.ops.executors.triton.launch_memory import Addresses, Memory
from ds_ext.ops.executors.triton.launch_queue import Key, LaunchQueue
from ds_ext.ops.executors.triton.launch_tables import (
    Constants,
    HostNumber,
    Launch,
    LaunchTables,
    Template,
)
from ds_ext.ops.executors.triton.launches import KernelConstants
from ds_ext.ops.executors.triton.tiles import Geometry, Int64s, TileKind, Tiles
from ds_ext.ops.formulas import Formula

Columns = Mapping[str, Any]
# Columns whose addresses must be aligned for vector access: runs only, or also ``out``.
VECTORS, OUT = (frozenset(COLUMNS[AT["x"] : AT[last] + 1]) for last in ("aux", "out"))
ADDRESS, NUMBER, NUMBERS_OF_EACH = range(3)  # what a column has; a formula has its structure
MAX_TEMPLATES = 256  # of one object; more are needed only if each step makes other passes
OF_WIDE_ROWS = {
    "weighted_sums": "wide_weighted_sums",
    "normalize_whole_rows": "normalize_wide_rows",
}


@dataclass(frozen=True)
class SquareParts:
    """Numbers that a pass leaves for each parameter and that add up to its sum of squares."""

    at: Any  # has ``pointers`` to them, [n]
    tiles: Tiles  # of the launch that adds them up


@dataclass(frozen=True)
class GradLimits:
    """A number on the device for each gradient of a batch, such as a sum of squares, and a limit.

    Attributes:
        found: the addresses of the numbers, [n]: fp32, such as sums of squares or votes.
        most: the largest numbers of good gradients, [n]; NaN is bad.
    """

    found: PointerArray
    most: NDArray[np.float32]


class Launcher:
    """Launches kernels over many parameters on a GPU.

    Args:
        geometries: start, elements, matrices, rows and columns of each run.
        firsts: the index of each run's first element in its parameter.
        device: the device of the runs.

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
        self._zeros = np.zeros(self.n, dtype=np.int64)
        self._own = np.arange(self.n)
        self._steps = 4 * self._own  # offsets of the numbers of a tensor [n], bytes
        start, n, mats, rows, cols = np.array(geometries, dtype=np.int64).T
        first = np.array(firsts, dtype=np.int64)
        self.geometry = Geometry(start, n, mats, rows, cols, first)
        self._templates: dict[tuple[Any, ...], list[Template]] = {}
        self._tables: dict[Key, LaunchTables] = {}  # of passes that are launched at once

    def enqueue(
        self, launches: Sequence[Launch], folds: Iterable[Launch] = (), only_sums: bool = False
    ) -> None:
        """Adds a pass to the queue, or launches it: see ``LaunchQueue.add``."""
        queue = self.queue or LaunchQueue(Memory(self.device), self._tables)
        queue.add(launches, folds, only_sums)
        if self.queue is None:
            queue.launch()

    @property
    def _memory(self) -> Memory:
        return Memory(self.device) if self.queue is None else self.queue.memory

    def added_up(self, squares: SquareParts) -> Tensor:
        """Queues the reduction of ``squares``; returns its results, [n]."""
        total = self.zeros(self.n)
        parts, outs = squares.at.pointers, Addresses(total, self._steps).pointers
        alive = [squares.at, total]
        self.enqueue((), [self._fold(squares.tiles, self._own, parts, outs, alive)])
        return total

    def copy_checked_values(self, limits: GradLimits, out: Addresses) -> None:
        """Queues a copy of each parameter's ``limits.found`` to ``out``."""
        columns = {"found": limits.found, "out": out}
        self.enqueue(self.launches("copy_checked_values", (), self.by_parameter, columns))

    def scratch(self, n: int) -> Tensor:
        """Returns uninitialized memory, [n] in fp32."""
        return self._memory.scratch(n)

    def zeros(self, n: int) -> Tensor:
        """Returns zeros to add sums to, [n] in fp32."""
        return self._memory.sums(n)

    @functools.cached_property
    def inverse_numel(self) -> NDArray[np.float32]:
        """1 / the elements of each whole parameter, [n]."""
        g = self.geometry
        return (1 / (g.mats * g.rows * g.cols)).astype(np.float32)

    @functools.cached_property
    def flat(self) -> Tiles:
        """Tiles of passes that ignore rows and columns."""
        return tiles.flat(self.geometry)

    @functools.cached_property
    def by_matrix(self) -> Tiles:
        """Tiles of passes that use rows and columns."""
        return tiles.by_matrix(self.geometry)

    @functools.cached_property
    def by_strip(self) -> Tiles:
        """Tiles that are as wide as the rows."""
        return tiles.by_strip(self.geometry)

    def new_norm_cache(self) -> DeviceNormCache:
        """Returns a cache of the weights' norms, which lasts from step to step."""
        return DeviceNormCache({name: parts for name, (parts, _) in self.sums.items()}, self.device)

    @functools.cached_property
    def recalled(self) -> dict[str, Tiles]:
        """Tiles with one program per parameter, which visits the parameter's tiles of this name."""
        return {"flat": _looked_through(self.flat), "by_matrix": _looked_through(self.by_matrix)}

    @functools.cached_property
    def by_parameter(self) -> Tiles:
        """One tile per parameter."""
        return tiles.by_parameter(self.geometry)

    @functools.cached_property
    def of_rows(self) -> Tiles:
        """Tiles of a factor for each row."""
        return tiles.of_factors(self.geometry.mats * self.geometry.rows)

    @functools.cached_property
    def of_cols(self) -> Tiles:
        """Tiles of a factor for each column."""
        return tiles.of_factors(self.geometry.mats * self.geometry.cols)

    @functools.cached_property
    def sums(self) -> dict[str, tuple[PartialOffsets, PartialReduction]]:
        """Reductions of one partial sum per tile to one sum per parameter, by the tiles' name."""
        of = {"flat": self.flat, "by_matrix": self.by_matrix}
        return {name: folds.of_tiles(at.programs) for name, at in of.items()}

    @functools.cached_property
    def sums_of_tiles(
        self,
    ) -> tuple[tuple[PartialOffsets, PartialReduction], tuple[PartialOffsets, PartialReduction]]:
        """Reductions of the tiles' row sums, and of their column sums."""
        g, at = self.geometry, self.by_matrix
        return folds.row_sums(g, at), folds.col_sums(g, at)

    @functools.cached_property
    def sums_of_strips(self) -> tuple[PartialOffsets, PartialReduction]:
        """Reduction of the strips' column sums."""
        return folds.col_sums(self.geometry, self.by_strip)

    @functools.cached_property
    def squares_of_tiles(self) -> Tiles:
        """Reduction of the tiles' row sums to one sum per parameter."""
        at = self.by_matrix
        return folds.of_one(at.of("height") * tiles.across(self.geometry))

    @functools.cached_property
    def squares_of_rows(self) -> Tiles:
        """Reduction of the sums of whole rows to one sum per parameter."""
        return folds.of_one(self.geometry.mats * self.geometry.rows)

    def launches(
        self,
        kernel: str,
        constants: Constants,
        at: Tiles,
        columns: Columns,
        vectors: frozenset[str] = VECTORS,
    ) -> list[Launch]:
        """Launches of a kernel over all parameters: one for aligned runs, one for the others.

        If tiles are as wide as rows, each width has its own launch, and rows that are wider than
        any tile use another kernel: a parameter's bits must not depend on its neighbours.
        """
        if self.limits is not None:
            columns = {**columns, "found": self.limits.found, "most": self.limits.most}
        addresses, numbers, kinds = self._divided(columns)
        are_even = None
        if at.aligned is not None:
            are_even = _are_even([x for name, x in addresses.items() if name in vectors])
        # All that templates depend on. They keep ``at`` alive, so that its id is its own.
        key = kernel, constants, id(at), are_even, *kinds.items()
        templates = self._templates.get(key)
        if templates is None:
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            constants = (*constants, ("JUDGED", self.limits is not None))
            specs = {FORMULAS[k]: _spec(x) for k, x in kinds.items() if isinstance(x, tuple)}
            named = tuple((name, specs.get(name, value)) for name, value in constants)
            templates = self._templates[key] = [
                Template(
                    *_of_kind(kernel, named, kind, at),
                    at,
                    None if len(own) == self.n else own,
                    [AT[name] for name in addresses],
                    [(AT[name], kinds[name] == NUMBERS_OF_EACH) for name in numbers],
                )
                for kind, own in at.kinds(None if are_even in (None, True) else np.array(are_even))
            ]
        given, values, alive = [*addresses.values()], [*numbers.values()], [*columns.values()]
        return [Launch(x, given, values, alive).cut(x.own) for x in templates]

    def _divided(
        self, columns: Columns
    ) -> tuple[dict[str, Int64s], dict[str, HostNumber], dict[str, object]]:
        """The addresses of columns, the host numbers of others, and what each column has."""
        addresses: dict[str, Int64s] = {}
        numbers: dict[str, HostNumber] = {}
        kinds: dict[str, object] = {}
        given: list[Tensor | float] = []
        for name, value in columns.items():
            if isinstance(value, float) and name in NUMBERS:
                kinds[name], numbers[name] = NUMBER, value
            elif (pointers := getattr(value, "pointers", None)) is not None:
                kinds[name], addresses[name] = ADDRESS, pointers
            elif isinstance(value, Formula):
                kinds[name] = value.taken_apart(given)
            elif isinstance(value, Tensor):
                kinds[name], addresses[name] = ADDRESS, self._addresses(value)
            elif name in NUMBERS:
                is_of_each = isinstance(value, np.ndarray)
                kinds[name] = NUMBERS_OF_EACH if is_of_each else NUMBER
                numbers[name] = value if is_of_each else float(value)
            else:
                assert not isinstance(value, float), f"{name} is an address"
                kinds[name], addresses[name] = ADDRESS, value + self._zeros
        assert len(given) <= schema.GIVEN, "a formula of more numbers than a pass takes"
        for i, value in enumerate(given):
            name = f"given{i}"
            if isinstance(value, Tensor):
                kinds[name], addresses[name] = ADDRESS, self._addresses(value)
            else:
                kinds[name], numbers[name] = NUMBER, float(value)
        return addresses, numbers, kinds

    def _addresses(self, number: Tensor) -> Int64s:
        """The address of each parameter's number, or of one number for all."""
        assert number.dtype == torch.float32 and number.is_contiguous()
        first = number.data_ptr()
        return first + (self._steps if number.numel() == self.n else self._zeros)

    def reduction_launch(
        self, how: tuple[PartialOffsets, PartialReduction], part: Tensor, out: Any
    ) -> Launch:
        """The launch that reduces the partial sums ``part`` and writes to ``out.pointers``."""
        fold = how[1]
        parts = part.data_ptr() + fold.parts
        outs = out.pointers[fold.owners] + fold.outs
        return self._fold(fold.tiles, fold.owners, parts, outs, [part, out])

    def _fold(
        self, at: Tiles, owners: Int64s, parts: Int64s, outs: Int64s, alive: list[object]
    ) -> Launch:
        """The launch that reduces partial sums; ``owners`` are the parameters of the reductions."""
        limits = self.limits
        key = ("fold", id(at), limits is None)
        if key not in self._templates:
            constants: Constants = (("JUDGED", limits is not None),)
            columns, numbers = [AT["part"], AT["out"]], list[tuple[int, bool]]()
            if limits is not None:
                columns, numbers = [*columns, AT["found"]], [(AT["most"], True)]
            self._templates[key] = [Template("fold", constants, at, None, columns, numbers)]
        (template,) = self._templates[key]
        if limits is None:
            return Launch(template, [parts, outs], [], alive)
        found = [parts, outs, limits.found.pointers[owners]]
        return Launch(template, found, [limits.most[owners]], [*alive, limits])

    def room(self, how: tuple[PartialOffsets, PartialReduction]) -> tuple[Tensor, Addresses]:
        """Memory for the tiles' partial sums, and the addresses of each parameter's."""
        part = self.scratch(how[0].total)
        return part, Addresses(part, how[0].starts)


@functools.cache
def _spec(structure: Any) -> KernelConstants:
    """The kernel constant of a formula's structure, which ``Formula.taken_apart`` returns."""
    name, *of = structure
    if name != "given":
        of = [*map(_spec, of)]
    return KernelConstants(name=name, **dict(zip("abc", [*of, None, None], strict=False)))


def _of_kind(kernel: str, constants: Constants, kind: TileKind, at: Tiles) -> tuple[str, Constants]:
    """The kernel of the parameters of one kind, and its constants."""
    if kind.aligned is not None:
        constants = (*constants, ("ALIGNED", kind.aligned))
    if kind.width:
        return kernel, (*constants, ("TC", kind.width))
    return kernel if at.widths is None else OF_WIDE_ROWS[kernel], constants


def _are_even(addresses: Sequence[Int64s]) -> bool | tuple[bool, ...]:
    """Whether addresses, [n] each, are aligned for vector access: True, or for each parameter."""
    if not addresses:
        return True
    bits = functools.reduce(operator.or_, addresses)
    if not np.bitwise_or.reduce(bits) % sizes.ALIGNMENT:
        return True
    even: list[bool] = (bits % sizes.ALIGNMENT == 0).tolist()
    return tuple(even)


def _looked_through(at: Tiles) -> Tiles:
    """The same tiles with one program per parameter, which visits all of them."""
    rows = at.rows.copy()
    rows[:, AT["total"]] = at.programs
    return replace(at, rows=rows, programs=np.ones_like(at.programs))
