"""The passes over a batch as launches. ``KernelTable`` has the interface of ``NativeTable``."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch

from ds_ext.ops import rounding, schema
from ds_ext.ops.executors.native.native_table import NormCache
from ds_ext.ops.executors.triton import tiles
from ds_ext.ops.executors.triton.launcher import OUT, KindOfSums, Launcher
from ds_ext.ops.executors.triton.tiles import Constants
from ds_ext.ops.runs import Call, Columns, Runs


class DeviceNormCache(NormCache):
    """One sum and one weight per tile.

    If one of these weights has changed, ``cached_norm`` reads all weights of the parameter in one
    program.

    Attributes:
        tiles: the name of the tiles that last wrote the runs.
    """

    def __init__(self, table: Launcher) -> None:
        self.table, self.tiles = table, ""
        self.columns: dict[str, Runs] = {}  # a sum and a weight per tile

    def noted_by(self, name: str) -> dict[str, Runs]:
        """Returns the columns that these tiles write; allocates them if the tiles have changed."""
        if name != self.tiles:
            partials = self.table.partials(name, tiles.of_tiles)
            size, device, firsts = (2, partials.total), self.table.device, partials.firsts
            numbers = torch.full(size, math.nan, dtype=torch.float32, device=device)
            sums, probes = numbers.unbind()
            self.tiles = name
            self.columns = {
                "part2": Runs((sums,), firsts=firsts),
                "probe": Runs((probes,), firsts=firsts),
            }
        return self.columns


def _numbers(call: Call) -> Columns:
    """The columns, with defaults of optional numbers, and keys of random bits as integers."""
    found = {"factor": 1.0, **call.columns}
    if "key" in found:
        found["key"] = Runs.at(0, np.asarray(found["key"], dtype=np.int64).reshape(-1))
    return found


def _constants(call: Call) -> Constants:
    """The constants for reading any form: see ``value_of`` in kernels/values.py."""
    scale = call.columns.get("scale", 1.0)
    scales = not (isinstance(scale, float) and scale == 1.0)
    format_, dtype = call.storage or ("PLAIN", None)
    run = ("XD", _name(call.dtype)), ("BOUNDED", "bound" in call.columns)
    weights = ("DECAYS", call.decays), ("WD", _name(dtype)), ("STORAGE", format_)
    return (("FORM", call.form), *run, *weights, ("SCALES", scales))


def _tiles(call: Call) -> str:
    """The name of the tiles of a pass over runs."""
    return "by_matrix" if schema.FORMS[call.form].is_by_matrix else "flat"


def _square_sums(table: Launcher, call: Call) -> None:
    cache: DeviceNormCache | None = call.columns.get("norm_cache")
    if cache is not None and cache.are_valid and cache.columns:
        columns = {k: v for k, v in call.columns.items() if k in ("w", "aux", "out")}
        table.launch("cached_norm", _constants(call), cache.tiles, {**columns, **cache.columns})
        return
    _adding_up(table, call, _tiles(call), {"out": ("part", tiles.of_tiles)})


def _row_col_sums(table: Launcher, call: Call) -> None:
    outs = {"out": ("part", tiles.row_sums), "out2": ("part2", tiles.col_sums)}
    _adding_up(table, call, "for_sums", outs)


def _weighted_sums(table: Launcher, call: Call) -> None:
    outs = {"out2": ("part", tiles.col_sums), "out3": ("part2", tiles.col_sums)}
    _adding_up(table, call, "by_strip", outs)


def _adding_up(
    table: Launcher, call: Call, tiles_of: str, outs: Mapping[str, tuple[str, KindOfSums]]
) -> None:
    """A pass and a fold; ``outs`` has the column and the kind of the partial sums of outputs."""
    columns: Columns = {}
    sums = []
    for name, value in _numbers(call).items():
        if name in outs:
            part, kind = outs[name]
            partials = table.partials(tiles_of, kind)
            columns[part] = table.allocate(partials)
            sums.append((partials, columns[part], value))
        elif name != "norm_cache":
            columns[name] = value
    table.launch(call.name, _constants(call), tiles_of, columns)
    table.fold(*sums)


def _factors(table: Launcher, call: Call) -> None:
    columns, g, kernel = dict(call.columns), table.geometry, "factors"
    if "in3" in columns:
        kernel = "clipped_factors"
        columns["a"] = (1 / (g.mats * g.rows * g.cols)).astype(np.float32)
    else:
        del columns["clip"]
    table.launch(kernel, (), "by_parameter", columns)


def _lerp(table: Launcher, call: Call) -> None:
    table.launch(call.name, _constants(call), _tiles(call), _numbers(call), OUT)


def _apply(table: Launcher, call: Call) -> None:
    columns = dict(_numbers(call))
    if call.storage is not None and call.storage[0] == "STOCHASTIC":
        columns["noise"] = Runs((rounding.shifted_noise(table.device),), firsts=0 * table.own)
    kernel, cache = "apply", columns.pop("norm_cache", None)
    if cache is not None:
        kernel = "apply_and_cache_norm"
        columns |= cache.noted_by(_tiles(call))
    table.launch(kernel, _constants(call), _tiles(call), columns)


def _name(dtype: torch.dtype | None) -> str:
    """Triton's name of a dtype; fp32 if there is no run."""
    return str(dtype or torch.float32).removeprefix("torch.")


PASSES: dict[str, Callable[[Launcher, Call], None]] = {
    "square_sums": _square_sums,
    "row_col_sums": _row_col_sums,
    "weighted_sums": _weighted_sums,
    "factors": _factors,
    "lerp": _lerp,
    "square_lerp": _lerp,
    "apply": _apply,
}


class KernelTable(Launcher):
    """The passes over many parameters on a GPU."""

    def run(self, call: Call) -> None:
        """Makes a pass: see ``NativeTable.run``.

        A column is an object with ``base`` and ``offsets``, [n], or a number. A number may be a
        float, an array [n], or a tensor with n elements or one.
        """
        PASSES[call.name](self, call)
