"""The passes over a batch as launches: a ``Table`` takes what that of native passes takes."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ext.ops.formulas import Formula
from ds_ext.ops.triton import folds, memory, sizes, tiles, verdicts, waiting
from ds_ext.ops.triton.columns import AT, FORMULAS, GIVEN, NUMBERS
from ds_ext.ops.triton.folds import Fold, Parts
from ds_ext.ops.triton.known import KnownSums
from ds_ext.ops.triton.memory import Addresses
from ds_ext.ops.triton.specs import Spec
from ds_ext.ops.triton.tables import Constants, HostNumber, Launch
from ds_ext.ops.triton.tiles import Geometry, Numbers, Tiles

Columns = Mapping[str, Any]
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
BY_MATRIX = ("IS_QUOTIENT", "IS_RESIDUAL")  # depend on the row and column of an element
# The columns of runs that are read in vectors, and of those that are written too.
VECTORS, OUT = slice(AT["x"], AT["aux"] + 1), slice(AT["x"], AT["out"] + 1)

OF_WIDE_ROWS = {"weighed": "wide_weighed", "normalize_whole_rows": "normalize_wide_rows"}


@dataclass(frozen=True)
class Read:
    """What a pass reads, and what else it needs: columns as ``Table.run`` takes them."""

    columns: Columns
    form: str
    dtype: torch.dtype | None
    kept: tuple[str, torch.dtype] | None
    decays: bool

    @property
    def numbers(self) -> Columns:
        """The columns, with numbers that are not always given."""
        return {"factor": 1.0, "scale": 1.0, **self.columns}

    @property
    def run(self) -> Constants:
        """How a run is read that is one as it is."""
        dtype = "float32" if self.dtype is None else DTYPES[self.dtype]
        return (("XD", dtype), ("BOUNDED", "bound" in self.columns))

    @property
    def constants(self) -> Constants:
        """How anything is read: see ``value_of`` in kernels/values.py."""
        how, dtype = self.kept or ("PLAIN", torch.float32)
        more: Constants = (("DECAYS", self.decays), ("WD", DTYPES[dtype]), ("KEPT", how))
        more = (*more, ("SCALED", None), ("DECAYED", None))
        return (("FORM", self.form), *self.run, *more)

    @property
    def only_sums(self) -> bool:
        """Whether to read it changes nothing."""
        return not self.form.endswith("_STEP") and self.form != "IS_RESIDUAL"


@dataclass(frozen=True)
class Squares:
    """Numbers that a pass leaves of each parameter, which add up to its sum of squares."""

    at: Any  # has ``pointers`` to them, [n]
    tiles: Tiles  # of what adds them up


class Table:
    """Many parameters on a GPU, and the passes over them.

    Args:
        geometries: start, elements, matrices, rows and columns of each run.
        firsts: the number, in its parameter, of each run's first element.
        device: where they lie.
    """

    adds_two = False  # squares of weights, and of what is read with them, in one pass
    fills_whole_sums = False  # sums lie beside those that are not filled

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

    def run(
        self,
        name: str,
        columns: Columns,
        form: str = "IS_WEIGHT",
        dtype: torch.dtype | None = None,
        kept: tuple[str, torch.dtype] | None = None,
        decays: bool = False,
        fresh: bool = False,
    ) -> Squares | None:
        """Makes a pass: see that of ``native.table.Table``.

        What has addresses is an object with ``pointers``, [n]; a number is one of the host, an
        array of them [n], a tensor on the device, [n] or of one number for all, or a formula.

        Returns:
            What adds up to the sums of squares, if the pass has made that.
        """
        return PASSES[name](self, Read(columns, form, dtype, kept, decays))

    def added_up(self, squares: Squares) -> Tensor:
        """Returns the sums of what passes have left, [n]."""
        total = self.zeros(self.n)
        outs = Addresses(total, 4 * np.arange(self.n)).pointers
        own = np.arange(self.n)
        launch = self._fold(squares.tiles, own, squares.at.pointers, outs, [squares.at, total])
        waiting.ask((), [launch])
        return total

    def tell(self, verdict: verdicts.Verdict, out: Addresses) -> None:
        """Writes what a verdict has found of each parameter to ``out``."""
        columns = {"found": verdict.found, "out": out}
        waiting.ask(self.launches("tell", (), self.by_parameter, columns))

    def scratch(self, n: int) -> Tensor:
        """Returns memory for n numbers, [n] in fp32."""
        return memory.current(self.device).scratch(n)

    def zeros(self, n: int) -> Tensor:
        """Returns sums of nothing yet, [n] in fp32."""
        return memory.current(self.device).sums(n)

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

    def known(self) -> KnownSums:
        """Returns what is kept of sums of squares of new weights, from step to step."""
        return KnownSums({name: parts for name, (parts, _) in self.sums.items()}, self.device)

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
        return folds.over_columns(g, at), folds.over_rows(g, at)

    @functools.cached_property
    def sums_of_strips(self) -> tuple[Parts, Fold]:
        """How sums over columns are added up of strips'."""
        return folds.over_rows(self.geometry, self.by_strip)

    @functools.cached_property
    def squares_of_tiles(self) -> Tiles:
        """How sums over rows of tiles are added up to one."""
        at = self.by_matrix
        return folds.of_one(at.of("height") * tiles.across(self.geometry))

    @functools.cached_property
    def squares_of_rows(self) -> Tiles:
        """How sums over whole rows are added up to one."""
        return folds.of_one(self.geometry.mats * self.geometry.rows)

    def tiles_of(self, read: Read) -> str:
        """The name of the tiles of a pass over runs."""
        return "by_matrix" if read.form in BY_MATRIX else "flat"

    def launches(
        self,
        kernel: str,
        constants: Constants,
        at: Tiles,
        columns: Columns,
        vectors: slice = VECTORS,
    ) -> Iterator[Launch]:
        """A kernel over all parameters: one launch of those with vectors, one of the others.

        Where tiles are as wide as rows, one for each width, and another kernel for rows that are
        wider than tiles. For a parameter's bits must not depend on those that are beside it.
        """
        verdict = verdicts.current()
        constants = (*constants, ("JUDGED", verdict is not None))
        if verdict is not None:
            columns = {**columns, "found": verdict.found, "most": verdict.most}
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
            where = memory.current(self.device)
            yield Launch(name, named, where, at, chosen, rows_of, programs, some, alive)

    def _filled(
        self, at: Tiles, columns: Columns
    ) -> tuple[Numbers, dict[str, HostNumber], dict[str, Spec]]:
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
        assert len(given) <= GIVEN, "a formula of more numbers than a pass takes"
        for i, value in enumerate(given):
            if isinstance(value, Tensor):
                rows[:, AT[f"given{i}"]] = self._addresses(value)
            else:
                numbers[f"given{i}"] = float(value)
        return rows, numbers, formulas

    def _addresses(self, number: Tensor) -> Numbers | int:
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
        self, at: Tiles, owners: Numbers, parts: Numbers, outs: Numbers, alive: list[object]
    ) -> Launch:
        """The launch that adds up numbers of ``owners`` among the parameters."""
        rows, numbers, verdict = at.rows.copy(), {}, verdicts.current()
        rows[:, AT["part"]], rows[:, AT["out"]] = parts, outs
        if verdict is not None:
            rows[:, AT["found"]] = verdict.found.pointers[owners]
            numbers["most"] = verdict.most[owners]
            alive.append(verdict)
        constants: Constants = (("JUDGED", verdict is not None),)
        where = memory.current(self.device)
        return Launch("fold", constants, where, at, None, rows, at.programs, numbers, alive)

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


def _squares(table: Table, read: Read) -> None:
    known: KnownSums | None = read.columns.get("known")
    if known is not None and known.are_valid:
        columns = {k: v for k, v in read.columns.items() if k in ("w", "aux", "out")}
        made = table.launches(
            "recall", read.constants, table.recalled[known.tiles], {**columns, **known.columns}
        )
        waiting.ask((), made, only_sums=True)
        return
    name = table.tiles_of(read)
    how = table.sums[name]
    part, places = table.room(how)
    columns = {k: v for k, v in read.numbers.items() if k not in ("out", "known")}
    columns["part"] = places
    # updates of vectors, which are small, have the warps of whole rows, to be in one launch
    warps = sizes.WIDE_WARPS if read.form == "IS_VECTOR" else None
    constants = (*read.constants, ("WARPS", warps))
    made = table.launches("squares", constants, getattr(table, name), columns)
    waiting.ask(made, [table.folded(how, part, read.columns["out"])], read.only_sums)


def _statistics(table: Table, read: Read) -> Squares:
    by_row, by_col = table.sums_of_tiles
    (tall, at_tall), (wide, at_wide) = table.room(by_row), table.room(by_col)
    columns = {k: v for k, v in read.numbers.items() if k not in ("out", "out2")}
    columns |= {"part": at_tall, "part2": at_wide}
    made = table.launches("statistics", read.constants, table.by_matrix, columns)
    outs = read.columns["out"], read.columns["out2"]
    folded = [table.folded(by_row, tall, outs[0]), table.folded(by_col, wide, outs[1])]
    waiting.ask(made, folded, read.only_sums)
    return Squares(at_tall, table.squares_of_tiles)


def _weighed(table: Table, read: Read) -> Squares:
    outs = {"out2": "part", "out3": "part2"}
    _over_strips(table, read, "weighed", outs, {"eps": "b"}, only_sums=True)
    return Squares(read.columns["out"], table.squares_of_rows)


def _normalize_whole_rows(table: Table, read: Read) -> None:
    roots = np.sqrt(table.geometry.cols).astype(np.float32)
    renamed = {"eps": "b", "row": "before"}
    _over_strips(table, read, "normalize_whole_rows", {"out2": "part"}, renamed, a=roots)


def _over_strips(
    table: Table,
    read: Read,
    kernel: str,
    outs: Mapping[str, str],
    renamed: Mapping[str, str],
    only_sums: bool = False,
    **more: Any,
) -> None:
    """A pass over whole rows, which leaves parts of the sums ``outs`` over columns."""
    how, columns = table.sums_of_strips, dict(more)
    folded: list[Launch] = []
    for name, value in read.numbers.items():
        if name in outs:
            part, columns[outs[name]] = table.room(how)
            folded.append(table.folded(how, part, value))
        else:
            columns[renamed.get(name, name)] = value
    del columns["scale"]
    made = table.launches(kernel, read.run, table.by_strip, columns)
    waiting.ask(made, folded, only_sums)


def _factors(table: Table, read: Read) -> None:
    named = {"in": "part", "in2": "part2", "in3": "x", "out2": "v", "eps": "b", "clip": "bound"}
    columns = {named.get(k, k): v for k, v in read.columns.items()}
    kernel = "factors"
    if "x" in columns:
        g = table.geometry
        kernel = "clipped_factors"
        columns["a"] = (1 / (g.mats * g.rows * g.cols)).astype(np.float32)
    else:
        del columns["bound"]
    waiting.ask(table.launches(kernel, (), table.by_parameter, columns))


def _normalize(table: Table, read: Read, is_by_row: bool) -> None:
    g = table.geometry
    count, size = (g.rows, g.cols) if is_by_row else (g.cols, g.rows)
    at = tiles.made(-(-g.mats * count // sizes.LONG), n=g.mats * count)
    columns = {"x": read.columns["in"], "v": read.columns["in2"], "out": read.columns["out"]}
    columns |= {"a": np.sqrt(size).astype(np.float32), "b": read.columns["eps"]}
    waiting.ask(table.launches("normalize", (), at, columns))


def _advance(table: Table, read: Read, kernel: str) -> None:
    columns = {{"eps": "b"}.get(k, k): v for k, v in read.numbers.items()}
    at = getattr(table, table.tiles_of(read))
    waiting.ask(table.launches(kernel, read.constants, at, columns, OUT))


def _apply(table: Table, read: Read) -> None:
    name = table.tiles_of(read)
    at, columns = getattr(table, name), dict(read.numbers)
    constants = (*read.constants, ("RATE", None))
    measured, known = columns.pop("measured", None), columns.pop("known", None)
    notes = known is not None
    if notes:
        columns |= known.noted_by(name)
    if measured is None:
        kernel = "noting_apply" if notes else "apply"
        waiting.ask(table.launches(kernel, constants, at, columns))
        return
    how = table.sums[name]
    moved, columns["part"] = table.room(how)
    if not notes:
        columns["part2"] = table.room(how)[1]
    constants = (*constants, ("NOTED", notes))
    made = table.launches("measured_apply", constants, at, columns)
    second = Addresses(measured.values, 4 * (measured.firsts + 1))
    held = columns["part2"].values
    folded = [table.folded(how, moved, measured), table.folded(how, held, second)]
    waiting.ask(made, folded)


def _mark(table: Table, read: Read) -> None:
    columns = {"w": read.columns["w"], "out": read.columns["marks"]}
    waiting.ask(table.launches("mark", (), table.by_group, columns))


def _mend(table: Table, read: Read) -> None:
    """Some states have no marks yet: those of an older file."""
    assert read.kept is not None
    is_split = read.kept[0] == "SPLIT"
    columns = {"w": read.columns["w"], "aux": read.columns["aux"], "before": read.columns["marks"]}
    dtype = "int16" if is_split else "int8"
    for one in table.launches("mend", (("AD", dtype),), table.by_group, columns):
        marked = one.rows[:, AT["before"]] != 0
        for kernel, constants, own in (
            ("mend", one.constants, marked),
            ("mend_unmarked", one.constants[1:], ~marked & is_split),
        ):
            if own.any():
                some = {"rows": one.rows[own], "programs": one.programs[own]}
                at = np.arange(len(own)) if one.own is None else one.own
                named = {"kernel": kernel, "constants": constants, "own": at[own]}
                waiting.ask([replace(one, **named, **some)])


PASSES: dict[str, Callable[[Table, Read], Squares | None]] = {
    "squares": _squares,
    "statistics": _statistics,
    "weighed": _weighed,
    "normalize_whole_rows": _normalize_whole_rows,
    "normalize_rows": functools.partial(_normalize, is_by_row=True),
    "normalize_columns": functools.partial(_normalize, is_by_row=False),
    "factors": _factors,
    "advance": functools.partial(_advance, kernel="lerp"),
    "advance_square": functools.partial(_advance, kernel="square_lerp"),
    "apply": _apply,
    "mark": _mark,
    "mend": _mend,
}
