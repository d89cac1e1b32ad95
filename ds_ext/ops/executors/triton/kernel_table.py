"""The passes over a batch as launches. ``KernelTable`` has the interface of ``NativeTable``."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ds_ext.ops import rounding, schema
from ds_ext.ops.executors.triton import sizes
from ds_ext.ops.executors.triton.columns import FORMULAS
from ds_ext.ops.executors.triton.device_norm_cache import DeviceNormCache
from ds_ext.ops.executors.triton.launch_memory import Addresses
from ds_ext.ops.executors.triton.launch_tables import Constants, Launch
from ds_ext.ops.executors.triton.launcher import OUT, Columns, Launcher, SquareParts


class Read(NamedTuple):
    """The arguments of a pass, as ``KernelTable.run`` takes them."""

    columns: Columns
    form: str
    dtype: torch.dtype | None
    storage: tuple[str, torch.dtype] | None
    decays: bool

    @property
    def numbers(self) -> Columns:
        """The columns, with defaults of optional numbers."""
        return {"factor": 1.0, **self.columns}

    @property
    def run(self) -> Constants:
        """The constants for reading a plain run."""
        return _run_constants(self.dtype, "bound" in self.columns)

    @property
    def constants(self) -> Constants:
        """The constants for reading any form: see ``value_of`` in kernels/values.py."""
        scale = self.columns.get("scale", 1.0)
        scales = not (isinstance(scale, float) and scale == 1.0)
        return _constants(self.form, self.run, self.decays, self.storage, scales)

    @property
    def only_sums(self) -> bool:
        """Whether reading the input leaves all moments as they are."""
        return not schema.FORMS[self.form].advances

    @property
    def tiles(self) -> str:
        """The name of the tiles of a pass over runs."""
        return "by_matrix" if schema.FORMS[self.form].is_by_matrix else "flat"


@functools.cache
def _run_constants(dtype: torch.dtype | None, is_bounded: bool) -> Constants:
    return (("XD", _name(dtype)), ("BOUNDED", is_bounded))


@functools.cache
def _constants(
    form: str,
    run: Constants,
    decays: bool,
    storage: tuple[str, torch.dtype] | None,
    scales: bool,
) -> Constants:
    how, dtype = storage or ("PLAIN", None)
    more: Constants = (("DECAYS", decays), ("WD", _name(dtype)), ("STORAGE", how))
    more = (*more, ("SCALES", scales), ("SCALED", None), ("DECAYED", None))
    return (("FORM", form), *run, *more)


def _square_sums(table: Launcher, read: Read) -> None:
    cache: DeviceNormCache | None = read.columns.get("norm_cache")
    if cache is not None and cache.are_valid:
        columns = {k: v for k, v in read.columns.items() if k in ("w", "aux", "out")}
        made = table.launches(
            "recall", read.constants, table.recalled[cache.tiles], {**columns, **cache.columns}
        )
        table.enqueue((), made)  # reads nothing of this step
        return
    name = read.tiles
    how = table.sums[name]
    part, places = table.room(how)
    columns = {k: v for k, v in read.numbers.items() if k not in ("out", "norm_cache")}
    columns["part"] = places
    # with the warps of ``weighted_sums``, both become one launch: launches merge by warps
    warps = sizes.WIDE_WARPS if read.form == "IS_VECTOR" else None
    constants = (*read.constants, ("WARPS", warps))
    made = table.launches("square_sums", constants, getattr(table, name), columns)
    table.enqueue(made, [table.reduction_launch(how, part, read.columns["out"])], read.only_sums)


def _row_col_sums(table: Launcher, read: Read) -> SquareParts:
    by_row, by_col = table.sums_of_tiles
    (tall, at_tall), (wide, at_wide) = table.room(by_row), table.room(by_col)
    columns = {k: v for k, v in read.numbers.items() if k not in ("out", "out2")}
    columns |= {"part": at_tall, "part2": at_wide}
    made = table.launches("row_col_sums", read.constants, table.by_matrix, columns)
    outs = read.columns["out"], read.columns["out2"]
    folded = [
        table.reduction_launch(by_row, tall, outs[0]),
        table.reduction_launch(by_col, wide, outs[1]),
    ]
    table.enqueue(made, folded, read.only_sums)
    return SquareParts(at_tall, table.squares_of_tiles)


def _weighted_sums(table: Launcher, read: Read) -> SquareParts:
    outs = {"out2": "part", "out3": "part2"}
    _over_strips(table, read, "weighted_sums", outs, only_sums=True)
    return SquareParts(read.columns["out"], table.squares_of_rows)


def _normalize_whole_rows(table: Launcher, read: Read) -> None:
    roots = np.sqrt(table.geometry.cols).astype(np.float32)
    _over_strips(table, read, "normalize_whole_rows", {"out2": "part"}, a=roots)


def _over_strips(
    table: Launcher,
    read: Read,
    kernel: str,
    outs: Mapping[str, str],
    only_sums: bool = False,
    **more: Any,
) -> None:
    """A pass over whole rows; ``outs`` maps column sums to the columns of their partial sums."""
    how, columns = table.sums_of_strips, dict(more)
    folded: list[Launch] = []
    for name, value in read.numbers.items():
        if name in outs:
            part, columns[outs[name]] = table.room(how)
            folded.append(table.reduction_launch(how, part, value))
        else:
            columns[name] = value
    columns.pop("scale", None)
    made = table.launches(kernel, read.run, table.by_strip, columns)
    table.enqueue(made, folded, only_sums)


def _factors(table: Launcher, read: Read) -> None:
    columns = dict(read.columns)
    kernel = "factors"
    if "in3" in columns:
        kernel = "clipped_factors"
        columns["a"] = table.inverse_numel
    else:
        del columns["clip"]
    table.enqueue(table.launches(kernel, (), table.by_parameter, columns))


def _normalize(table: Launcher, read: Read, is_by_row: bool) -> None:
    size = table.geometry.cols if is_by_row else table.geometry.rows
    at = table.of_rows if is_by_row else table.of_cols
    columns = {**read.columns, "a": np.sqrt(size).astype(np.float32)}
    table.enqueue(table.launches("normalize", (), at, columns))


def _lerp(table: Launcher, read: Read, kernel: str) -> None:
    at = getattr(table, read.tiles)
    table.enqueue(table.launches(kernel, read.constants, at, read.numbers, OUT))


def _apply(table: Launcher, read: Read) -> None:
    name = read.tiles
    at, columns = getattr(table, name), dict(read.numbers)
    constants = (*read.constants, ("RATE", None))
    if read.storage is not None and read.storage[0] == "STOCHASTIC":
        columns["noise"] = rounding.shifted_noise(table.device).data_ptr()
    sums, cache = columns.pop("update_sums", None), columns.pop("norm_cache", None)
    notes = cache is not None
    if notes:
        columns |= cache.noted_by(name)
    if sums is None:
        kernel = "noting_apply" if notes else "apply"
        table.enqueue(table.launches(kernel, constants, at, columns))
        return
    how = table.sums[name]
    moved, columns["part"] = table.room(how)
    if not notes:
        columns["part2"] = table.room(how)[1]
    constants = (*constants, ("NOTED", notes))
    made = table.launches("measured_apply", constants, at, columns)
    second = Addresses(sums.values, 4 * (sums.firsts + 1))
    held = columns["part2"].values
    folded = [table.reduction_launch(how, moved, sums), table.reduction_launch(how, held, second)]
    table.enqueue(made, folded)


def _name(dtype: torch.dtype | None) -> str:
    """Triton's name of a dtype; fp32 if there is no run."""
    return str(dtype or torch.float32).removeprefix("torch.")


PASSES: dict[str, Callable[[Launcher, Read], SquareParts | None]] = {
    "square_sums": _square_sums,
    "row_col_sums": _row_col_sums,
    "weighted_sums": _weighted_sums,
    "normalize_whole_rows": _normalize_whole_rows,
    "normalize_rows": functools.partial(_normalize, is_by_row=True),
    "normalize_columns": functools.partial(_normalize, is_by_row=False),
    "factors": _factors,
    "lerp": functools.partial(_lerp, kernel="lerp"),
    "square_lerp": functools.partial(_lerp, kernel="square_lerp"),
    "apply": _apply,
}


class KernelTable(Launcher):
    """The passes over many parameters on a GPU."""

    fuses_squares = False  # one pass adds up squares of an input and of the weights that it reads
    overwrites_sums = False  # adjacent sums come from ``zeros``, even if a pass writes all
    passes = frozenset(PASSES)
    takes_formulas = frozenset(FORMULAS)  # columns that may be formulas

    def run(
        self,
        name: str,
        columns: Columns,
        form: str = "IS_WEIGHT",
        dtype: torch.dtype | None = None,
        storage: tuple[str, torch.dtype] | None = None,
        decays: bool = False,
        fresh: bool = False,
    ) -> SquareParts | None:
        """Makes a pass: see ``NativeTable.run``.

        A column is an object with ``pointers``, [n], or a number. A number may be a float, an
        array [n], a tensor on the device with n elements or one, or a formula.

        Returns:
            The partial sums of squares, if the pass leaves them.
        """
        return PASSES[name](self, Read(columns, form, dtype, storage, decays))
