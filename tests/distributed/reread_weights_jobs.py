"""Jobs whose weights are read again after their step, or edited."""

import contextlib
from typing import Any

import deepspeed
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_ext
from tests.common import engines
from tests.common.ranks import whole
from tests.distributed.fully_shard_jobs import full
from tests.tools.old_checkpoints import Whole
from tests.unit.test_reread_weights import Reading


def make() -> Reading:
    torch.manual_seed(2)
    return Reading()


def loss_of(model: Any, number: int, rank: int) -> torch.Tensor:
    return model(engines.rows(number, rank, 3, 5))


def penalized() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def penalized_loss(model: Any, number: int, rank: int) -> torch.Tensor:
    x = engines.rows(number, rank, 3, 5).requires_grad_()
    loss = (model(x) - 1).square().sum()
    (by_input,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 0.1 * by_input.square().sum()


def step(stage: int, is_penalized: bool, accumulation: int) -> dict[str, Any]:
    """One step of a model that reads a weight again, or by a gradient penalty.

    Returns the weights before and after, and the error.
    """
    model = penalized() if is_penalized else make()
    loss = penalized_loss if is_penalized else loss_of
    engine = engines.start(
        model,
        ds_ext.LOMO(model.parameters(), lr=0.1),
        stage,
        "sharded" if is_penalized else "",
        gradient_accumulation_steps=accumulation,
        zero={"reduce_bucket_size": 25, "overlap_comm": False},
    )
    before, said = whole(model), ""
    try:
        engines.trained(engine, loss, 1, accumulation)
    except RuntimeError as error:
        said = str(error)
    has_ended = is_penalized or not said  # else weights of stage 3 may be in use
    return {"message": said, "before": before, "after": whole(model) if has_ended else {}}


def alone(is_penalized: bool) -> engines.Alone:
    model = penalized() if is_penalized else make()
    loss = penalized_loss if is_penalized else loss_of
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return engines.alone(model, sgd, loss, 1)


HYPERS = {"lr": 5e-4, "weight_update": "master"}


def edited(way: int | str, dtype: torch.dtype, steps: int) -> dict[str, Tensor]:
    """The whole weights after steps by one gradient, each followed by a clamp of all weights.

    ``way`` is "fused", "FSDP2" or a stage of ZeRO.
    """
    model = Whole().to(dtype)
    if way == "FSDP2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = ds_ext.AdaLomo(model.parameters(), **HYPERS)
    if isinstance(way, str):
        ds_ext.fuse_into_backward(model, optimizer)
    else:
        bf16 = {"enabled": dtype == torch.bfloat16}
        model = engines.start(model, optimizer, way, bf16=bf16)
    for _ in range(steps):
        model.backward(model(0)) if isinstance(way, int) else model(0).backward()
        (model if isinstance(way, int) else optimizer).step()
        for p in model.parameters():
            with _editable(p, way):
                _local(p).clamp_(-0.5, 0.5)
    if way == "FSDP2":
        return {n: full(p).clone() for n, p in model.named_parameters()}
    return whole(model.module if isinstance(way, int) else model)


def _editable(p: Tensor, way: int | str) -> contextlib.AbstractContextManager[Any]:
    if way == 3:
        return deepspeed.zero.GatheredParameters([p], modifier_rank=0)
    return contextlib.nullcontext()


def _local(p: Any) -> Tensor:
    return p.to_local().detach() if hasattr(p, "to_local") else p.data
