"""Exchanges a model's weights with their moving averages, and restores them.

Weights and averages of one dtype change places. Otherwise the average stays in the state, and this
rank's weights are copied: 2 bytes for each 16-bit weight. Masters and fingerprints do not change,
because the weights that return are the ones that a step has written.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ds_ext.distributed.layout import Layout
from ds_ext.optimizer import ema, host_offload, plain_step
from ds_ext.optimizer.param_table import ParamTable

BUCKET_ELEMENTS = 2**24  # weights that are exchanged before they are sent to other ranks


@contextlib.contextmanager
def exchanged(table: ParamTable, layout: Layout | None) -> Iterator[None]:
    """Context in which the model has the averages of its weights; all ranks enter and leave it.

    A weight that was not stepped yet, or whose group has no ``ema_decay``, stays as it is.

    Args:
        table: the optimizer.
        layout: of the model; None if this process holds it whole.

    Raises:
        ValueError: no group has ``ema_decay``.
        RuntimeError: the model already has the averages.
    """
    table.refuse_exchanged()
    if not any(table.rule_at(i).ema_decay for i in range(len(table.index.groups))):
        raise ValueError(
            "ema(): no weights are averaged, because ema_decay is 0. Set "
            '"optimizer": {"params": {"ema_decay": 0.999}} in the config, or ema_decay=0.999 in '
            "the optimizer's constructor. A loaded checkpoint brings its own ema_decay: set it in "
            "param_groups after loading."
        )
    averaged = [
        p
        for p in table.number_of
        if table.rule_of(p).ema_decay and table.state.get(p, {}).get("step")
    ]
    copies: dict[Tensor, Tensor | None] = {}  # of exchanged weights; None: in place of the average
    table.is_exchanged = True
    try:
        _exchange(table, layout, averaged, copies)
        yield
    finally:
        _exchange(table, layout, [*copies], copies)
        table.is_exchanged = False


@torch.no_grad()
def _exchange(
    table: ParamTable,
    layout: Layout | None,
    params: Iterable[Tensor],
    copies: dict[Tensor, Tensor | None],
) -> None:
    """Exchanges weights and averages, bucket by bucket, or restores those in ``copies``."""
    for bucket in plain_step.buckets(params, BUCKET_ELEMENTS):
        for param in bucket:
            _exchange_one(table, layout, param, copies)
        if layout is not None:
            layout.publish(bucket)
    if layout is not None:
        layout.end_step()


def _exchange_one(
    table: ParamTable, layout: Layout | None, param: Tensor, copies: dict[Tensor, Tensor | None]
) -> None:
    run = table.local_run(param) if layout is None else layout.run(param)
    now, copy = run.clone(), copies.get(param)
    if copy is not None:
        run.copy_(copy)
    else:
        is_alike = True
        for at, s in ema.states(table.shard(param), table.state[param]):
            run[at].copy_(s[ema.EMA])
            is_alike = s[ema.EMA].dtype == run.dtype
            if is_alike:
                s[ema.EMA].copy_(now[at])
    if param in copies:
        del copies[param]
    else:
        stored = None if is_alike else host_offload.store(now, param.device, table.offload)
        copies[param] = stored
    if layout is None and not param.is_contiguous():  # the run is a copy
        param.copy_(run.view_as(param))
