"""Replaces a model's weights by their moving averages, and restores them.

Each rank keeps a copy of its own weights meanwhile. Masters do not change, because leaving the
context restores the weights of the last step.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ds_ext.distributed.layout import Layout
from ds_ext.optimizer import ema, expert_stacks, host_offload, plain_step
from ds_ext.optimizer.param_table import ParamTable

BUCKET_ELEMENTS = 2**24  # weights that are exchanged before they are sent to other ranks


@contextlib.contextmanager
def exchanged(table: ParamTable, layout: Layout | None) -> Iterator[None]:
    """Context in which the model has the averages of its weights; all ranks enter and leave it.

    A weight that was not stepped yet, or whose group has no ``ema_decay``, stays as it is. Without
    a ``layout``, this process holds the model whole.

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
    copies: dict[Tensor, Tensor] = {}  # of the replaced weights

    def average(param: Tensor, run: Tensor) -> None:
        copies[param] = host_offload.store(run.clone(), param.device, table.offload)
        for own, _, state in expert_stacks.matrices(table.shard(param), table.state[param]):
            run[own].copy_(state[ema.EMA])

    table.is_exchanged = True
    try:
        _write(layout, averaged, average)
        yield
    finally:
        _write(layout, [*copies], lambda param, run: run.copy_(copies.pop(param)))
        table.is_exchanged = False


@torch.no_grad()
def _write(
    layout: Layout | None, params: Iterable[Tensor], write: Callable[[Tensor, Tensor], object]
) -> None:
    """Overwrites weights on all ranks, bucket by bucket; ``write`` gets a parameter and its run."""
    for bucket in plain_step.buckets(params, BUCKET_ELEMENTS):
        for param in bucket:
            run = param.detach().reshape(-1) if layout is None else layout.run(param)
            write(param, run)
            if layout is None and not param.is_contiguous():  # the run is a copy
                param.copy_(run.view_as(param))
        if layout is not None:
            layout.publish(bucket)
    if layout is not None:
        layout.end_step()
