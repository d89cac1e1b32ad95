"""Weights that backward reads again after their step."""

from typing import Any

import pytest
import torch

import ds_ext
from tests import worlds
from tests.common import engines
from tests.common.ranks import whole
from tests.common.updates import check_each
from tests.unit.test_odd_models import Reading


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


@pytest.mark.parametrize("world, stage", [(1, 0), (1, 3), (2, 0), (2, 2), (2, 3)])
def test_a_weight_read_again_is_the_old_one_or_an_error(world, stage):
    for got in worlds.run(world, step, stage, False, 1):
        if (world, stage) == (2, 3):  # where it was gathered before, and its shards are stepped
            check_each(got["after"], alone(False).after, got["before"])
        else:
            assert "modified by an inplace operation" in got["message"]


@pytest.mark.parametrize("stage, accumulation", [(0, 1), (1, 1), (0, 2), (2, 2), (3, 1)])
def test_a_gradient_penalty_is_exact_or_refused_before_a_step(stage, accumulation):
    """DeepSpeed's hook of a model's output divides by the number of micro-batches each time."""
    for got in worlds.run(2, step, stage, True, accumulation):
        if accumulation == 1 and stage < 3:
            check_each(got["after"], alone(True).after, got["before"])
        else:
            assert "create_graph=True" in got["message"]
            assert all(got["after"][n].equal(w) for n, w in got["before"].items())
