"""Jobs whose weights are read again after their step, or are complex."""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ds_ext
from tests.common.ranks import message
from tests.distributed.exact_clipping_jobs import config
from tests.distributed.training_jobs import whole
from tests.unit.test_reread_weights import Reading, Rotating


def make() -> Reading:
    torch.manual_seed(2)
    return Reading()


def data(rank: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))


def reread(stage: int) -> dict[str, Any]:
    """One step of a model that reads a weight again -> the weights, or the error."""
    made = config(stage)
    made["gradient_clipping"] = 0.0
    made["zero_optimization"] |= {"reduce_bucket_size": 25, "overlap_comm": False}
    model = make()
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]
    before = whole(model)
    try:
        engine.backward(engine(data(dist.get_rank())))
    except RuntimeError as error:
        return {"message": str(error)}
    engine.step()
    return {"message": "", "before": before, "after": whole(model)}


def penalty(stage: int, accumulation: int) -> dict[str, Any]:
    """One step by a loss with a gradient penalty -> the weights, or the error."""
    made = config(stage) | {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.0}
    made["ds_ext"] = {"gradient_policy": "sharded"}
    model = penalized()
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]
    before = whole(model)
    try:
        for _ in range(accumulation):
            engine.backward(penalized_loss(engine, dist.get_rank()))
            engine.step()
    except RuntimeError as error:
        return {"message": str(error), "before": before, "after": whole(model)}
    return {"message": "", "before": before, "after": whole(model)}


def penalized() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def penalized_loss(model: Any, rank: int) -> torch.Tensor:
    x = data(rank).requires_grad_()
    loss = (model(x) - 1).square().sum()
    (by_input,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 0.1 * by_input.square().sum()


def complex_parameter(stage: int) -> str:
    """What a config's optimizer says of a model with a complex parameter."""
    made = config(stage) | {"optimizer": {"type": "Lomo", "params": {"lr": 0.1}}}
    model = Rotating(trains=True)
    return message(lambda: deepspeed.initialize(model=model, config=made), ValueError)
