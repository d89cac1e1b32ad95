"""One kernel over one parameter, and how a pass becomes one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ds_ext.ops.shard import Shard
from ds_ext.ops.sources import Number, Source
from ds_ext.ops.triton import sizes, tiles
from ds_ext.ops.triton.tiles import Tiles

Constants: TypeAlias = tuple[tuple[str, Any], ...]
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_DTYPES |= {torch.int16: "int16", torch.int8: "int8"}


@dataclass(frozen=True)
class Request:
    """A kernel over one parameter: those with the same constants can be one launch."""

    kernel: str
    constants: Constants
    programs: int
    geometry: Mapping[str, int]
    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Number]

    def plus(self, tensors: Mapping[str, Tensor], **numbers: Number) -> "Request":
        """Returns the same with more tensors and numbers."""
        return replace(
            self, tensors={**self.tensors, **tensors}, numbers={**self.numbers, **numbers}
        )

    @property
    def device(self) -> torch.device:
        """Returns where its tensors lie."""
        return next(iter(self.tensors.values())).device

    @property
    def is_aligned(self) -> bool:
        """Whether no vector of the kernel's runs crosses the end of a row or of the run."""
        at, unit = self.geometry, sizes.ALIGNMENT
        if not {"start", "n", "cols"} <= at.keys():
            return False  # reads no runs
        return all(at[name] % unit == 0 for name in ("start", "n", "cols")) and all(
            x.data_ptr() % unit == 0 for x in self.tensors.values()
        )


def over_run(kernel: str, source: Source, shard: Shard) -> Request:
    """A pass over a run, which needs no rows and columns but those that ``source`` may have."""
    if source.is_by_matrix:
        return over_matrices(kernel, source, shard)
    return _of(kernel, _constants(source), source, tiles.flat(shard))


def over_matrices(kernel: str, source: Source, shard: Shard) -> Request:
    """A pass over the rows and columns of a run."""
    own, rows, cols = tiles.alone(shard)
    at = _within(shard, tiles.by_matrix(own))
    return _of(kernel, _constants(source), source.within(rows, cols), at)


def over_strips(kernel: str, source: Source, shard: Shard) -> Request:
    """A pass over whole rows of a run, in strips as wide as they are."""
    wide = max(sizes.NARROWEST, 1 << (shard.cols - 1).bit_length())
    constants = dict(_constants(source))
    named = (("XD", constants["XD"]), ("BOUNDED", constants["BOUNDED"]), ("TC", wide))
    own, _, _ = tiles.alone(shard)
    return _of(kernel, named, source, _within(shard, tiles.by_strip(own)))


def over_groups(
    kernel: str, run: Tensor, tensors: Mapping[str, Tensor], kept: torch.dtype | None = None
) -> Request:
    """A pass over a 16-bit run, beside which ``kept`` is kept, as groups that share a mark."""
    at = tiles.by_group(len(run))
    constants = () if kept is None else (("AD", _DTYPES[kept]),)
    return Request(kernel, constants, at.programs, at.geometry, {"w": run, **tensors}, {})


def _of(kernel: str, constants: Constants, source: Source, at: Tiles) -> Request:
    """A kernel over these tiles of what it reads."""
    kept = source.kept
    tensors = {**source.tensors, **({} if kept is None else kept.tensors)}
    geometry = {**at.geometry, "key": 0 if kept is None else kept.key}
    numbers = {"factor": 1.0, "scale": 1.0, **source.numbers}
    return Request(kernel, constants, at.programs, geometry, tensors, numbers)


def _within(shard: Shard, at: Tiles) -> Tiles:
    """Tiles of a run that is a part of ``shard``'s parameter: noise is drawn by its elements."""
    return replace(at, geometry=at.geometry | {"origin": shard.start})


def _constants(source: Source) -> Constants:
    """How what is read is read: see ``value_of`` in kernels/values.py."""
    run, kept = source.tensors.get("x"), source.kept
    return (
        ("FORM", source.form),
        ("XD", "float32" if run is None else _DTYPES[run.dtype]),
        ("BOUNDED", "bound" in source.numbers),
        ("DECAYS", "decay" in source.numbers),
        ("WD", "float32" if kept is None else _DTYPES[kept.run.dtype]),
        ("KEPT", "PLAIN" if kept is None else kept.how),
    )
