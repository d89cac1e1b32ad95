"""Exchanges a model's weights with their moving averages, and restores them.

Weights and averages of one dtype change places. bf16 weights and fp32 averages share the memory of
both (``_swap``). With other dtypes this rank's weights are copied. Masters do not
change, because leaving the context restores the weights of the last step.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ds_ext.distributed.layout import Layout
from ds_ext.optimizer import ema, expert_stacks, host_offload, plain_step
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
    shard, state = table.shard(param), table.state[param]
    pairs = [(run[at], s[ema.EMA]) for at, _, s in expert_stacks.matrices(shard, state)]
    is_back, copy, stored = param in copies, copies.pop(param, None), None
    dtypes = run.dtype, pairs[0][1].dtype
    if dtypes[0] == dtypes[1] or dtypes == (torch.bfloat16, torch.float32):
        for weight, average in pairs:
            _swap(weight, average, is_back)
    elif copy is not None:
        run.copy_(copy)
    else:
        stored = host_offload.store(run.clone(), param.device, table.offload)
        for weight, average in pairs:
            weight.copy_(average)
    if not is_back:
        copies[param] = stored
    if layout is None and not param.is_contiguous():  # the run is a copy
        param.copy_(run.view_as(param))


def _swap(weight: Tensor, average: Tensor, is_back: bool) -> None:
    """Exchanges weights and averages, [n], in their memory.

    An fp32 average is the sum of its upper 16 bits, rounded, and its lower 16 bits as a signed
    number. During the exchange, the weight has the upper bits, and the average's memory has the
    weight's bits in their place.
    An average in the middle of two bf16 numbers is rounded away from zero, not to even.
    """
    if weight.dtype == average.dtype:
        before = weight.clone()
        weight.copy_(average)
        average.copy_(before)
        return
    bits = weight.view(torch.int16)
    lower, upper = average.view(torch.int16).view(-1, 2).unbind(1)  # on little-endian machines
    rounded_up = (lower < 0).short()
    if is_back:
        rounded = bits.to(upper.device, copy=True)
        bits.copy_(upper)
        upper.copy_(rounded - rounded_up)
    else:
        rounded = upper + rounded_up
        upper.copy_(bits)
        bits.copy_(rounded)
