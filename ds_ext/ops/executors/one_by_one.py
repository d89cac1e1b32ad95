"""Makes passes over a batch that no table supports: the reference executor, for each parameter.

A rule may therefore use any expression in a batch. This is slower than a table; the log says once.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_ext.logs import logger
from ds_ext.ops import passes
from ds_ext.ops.batch import Flat, Runs, Shifted, Weights
from ds_ext.ops.executors.native.norm_cache import NormCache
from ds_ext.ops.executors.reference import Reference
from ds_ext.ops.executors.table_batch import TableBatch
from ds_ext.ops.expressions import Quotient
from ds_ext.ops.shard import Shard
from ds_ext.ops.weight_storage import MASTERS, StochasticWeight


class OneByOne:
    """The executor of all passes over batches that tables do not support."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference

    def run(self, asked: Any, where: Any) -> Any:
        """See ``dispatch.Executor``.

        Raises:
            TypeError: the pass returns factors of the whole batch, which only tables can make.
        """
        if isinstance(asked, _OF_TABLES):
            raise TypeError(
                f"{type(asked).__name__} over a batch needs fp32 factors and an expression that "
                "native code or kernels read: register the rule with is_batched=False."
            )
        _warn(type(asked).__name__, where.device.type)
        good, made = _good(where), []
        for i, shard in enumerate(where.shards):
            one = _part(asked, i, where)
            if not good[i] and type(asked) in _SKIPPED:
                made.append(_SKIPPED[type(asked)](one, shard))
            elif isinstance(asked, passes.Apply):
                self._apply(one, asked.p, i, shard)
                made.append(None)
            else:
                made.append(self.reference.run(one, shard))
        return _joined(asked, made, where)

    def _apply(self, one: passes.Apply, p: Any, i: int, shard: Shard) -> None:
        """Writes the weights of parameter ``i``; adds their change to ``p.update_sums`` if set."""
        before = _values(one.p, shard) if p.update_sums is not None else None
        self.reference.run(one, shard)
        if isinstance(p.norm_cache, NormCache):
            p.norm_cache.clear()
        if before is not None:
            after = _values(one.p, shard)
            sums = torch.stack([(after - before).square().sum(), after.square().sum()])
            if isinstance(p.update_sums, Flat):
                p.update_sums.values[2 * i : 2 * i + 2] = sums
            else:
                p.update_sums.tensors[i] += sums


_OF_TABLES = (passes.UnitQuotient, passes.NormalizeRows, passes.NormalizeColumns)


@functools.cache
def _warn(name: str, device: str) -> None:
    logger.info("%s on %s: no kernel runs it over a batch, so PyTorch operations do", name, device)


def _values(p: Any, shard: Shard) -> Tensor:
    return passes.evaluate(p, shard, p if isinstance(p, Tensor) else p.run).double()


def _good(batch: TableBatch) -> Sequence[bool]:
    """Whether each parameter's gradient is within the batch's limits; True without limits."""
    limits = batch.limits
    if limits is None:
        return [True] * len(batch)
    found = limits.found.values
    return (found.float().cpu().numpy() <= limits.most).tolist()  # type: ignore[no-any-return]


def _zero(like: Any) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=like.device)


# The results of a pass that skips a parameter because its gradient is bad.
_SKIPPED: dict[type, Callable[[Any, Shard], Any]] = {
    passes.SquareSums: lambda asked, _: [_zero(asked.like) for _ in asked.runs],
    passes.Factors: lambda asked, _: tuple(
        torch.zeros_like(x).unsqueeze(at) for x, at in ((asked.row, -1), (asked.col, -2))
    ),
    passes.Advance1x1: lambda asked, _: _zero(asked.row),
    passes.Lerp: lambda *_: None,
    passes.SquareLerp: lambda *_: None,
    passes.Apply: lambda *_: None,
}


def _part(asked: Any, i: int, batch: TableBatch) -> Any:
    """The pass over parameter ``i`` of a batch."""
    shard, found = batch.shards[i], dict[str, Any]()
    rows, cols = (shard.mats, shard.rows), (shard.mats, shard.cols)
    for name, x in asked._asdict().items():
        if name == "sums" and isinstance(asked, passes.Factors):
            firsts = (batch.row_firsts, batch.col_firsts, batch.col_firsts)
            shapes = (rows, cols, cols)
            found[name] = tuple(map(_cut, x, firsts, shapes, [i] * len(x)))
        elif name == "squares":
            found[name] = _cut(x, batch.firsts, (shard.numel,), i)
        else:
            found[name] = _of(x, i, batch)
    return type(asked)(**found)


def _of(x: Any, i: int, batch: TableBatch) -> Any:
    """The value of a pass's argument, or of an expression's field, for parameter ``i``."""
    shard = batch.shards[i]
    if isinstance(x, Runs):
        return x.tensors[i]
    if isinstance(x, Weights):
        return _weight(x, i, batch)
    if isinstance(x, Shifted):
        start = int(x.by[i]) // 4
        return _of(x.runs, i, batch).view(-1)[start : start + len(shard)]
    if isinstance(x, np.ndarray):
        return float(x[i])
    if isinstance(x, Tensor):
        return x[i] if x.dim() else x
    if isinstance(x, list | tuple):
        return tuple(_of(one, i, batch) for one in x)
    if isinstance(x, Quotient):
        row = _factor(x.row, batch.row_firsts, (shard.mats, shard.rows, 1), i)
        col = _factor(x.col, batch.col_firsts, (shard.mats, 1, shard.cols), i)
        return Quotient(_of(x.x, i, batch), row, col, _of(x.scale, i, batch))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        names = [f.name for f in dataclasses.fields(x) if not f.name.startswith("_")]
        return type(x)(**{name: _of(getattr(x, name), i, batch) for name in names})
    return x


def _factor(x: Any, firsts: Any, shape: tuple[int, ...], i: int) -> Tensor:
    return _cut(x.values, x.firsts, shape, i) if isinstance(x, Flat) else _cut(x, firsts, shape, i)


def _cut(x: Tensor, firsts: Any, shape: tuple[int, ...], i: int) -> Tensor:
    """The numbers of parameter ``i`` in the concatenated numbers of all parameters."""
    start = int(firsts[i])
    return x.view(-1)[start : start + int(np.prod(shape))].view(shape)


def _weight(p: Weights, i: int, batch: TableBatch) -> Any:
    run = p.run.tensors[i]
    if p.how == "STOCHASTIC":
        assert p.key is not None
        return StochasticWeight(run, int(p.key[i]), batch.noise_firsts[i])
    if p.aux is None:
        return run
    return MASTERS[p.aux.dtype](run, p.aux.tensors[i])


def _joined(asked: Any, made: Sequence[Any], batch: TableBatch) -> Any:
    """The results of all parameters, in the form that tables return."""
    if made[0] is None:
        return None
    if isinstance(asked, passes.SquareSums):
        return [torch.stack(sums) for sums in zip(*made, strict=True)]
    if isinstance(asked, passes.Advance1x1):
        return torch.stack(list(made))
    if isinstance(asked, passes.ScatteredSquares):
        return torch.cat(list(made))
    if isinstance(asked, passes.NormalizeWholeRows):
        row = Flat(_flat([x.row for x, _ in made]), batch.row_firsts)
        sums = _flat([sums for _, sums in made])
        return dataclasses.replace(asked.x, row=row, scale=1.0), sums  # type: ignore[arg-type]
    found = tuple(_flat(of_all) for of_all in zip(*made, strict=True))
    if isinstance(asked, passes.Factors):
        return Flat(found[0], batch.row_firsts), Flat(found[1], batch.col_firsts)
    return found


def _flat(of_all: Sequence[Tensor]) -> Tensor:
    """The concatenated numbers of all parameters."""
    return torch.cat([x.reshape(-1) for x in of_all])
