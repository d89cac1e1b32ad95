"""A loss of several forward passes is one micro-batch, also where they run ahead of backward.

test_scenarios.py holds such losses against torch at every stage.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_ext
from tests import worlds
from tests.common import engines
from tests.common.choose import params
from tests.common.ranks import whole
from tests.common.updates import check_each

LR = 0.5
STEPS = 3


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    """Of siamese networks, whose weights are those of one."""
    x = engines.rows(number, rank, 4, 5)
    return (model(x[:2]) - model(x[2:])).square().sum() + model(x[1:3]).sum()


WARMUP = {"warmup_min_lr": LR / 4, "warmup_max_lr": LR, "warmup_num_steps": 4}
SCHEDULER = {"type": "WarmupLR", "params": WARMUP | {"warmup_type": "linear"}}


def train(stage: int, policy: str, accumulation: int, max_norm: float, how: str) -> dict[str, Any]:
    """Trains by our LOMO; or by SGD of torch in DeepSpeed's own optimizer if ``policy`` is ""."""
    model = make()
    kind = ds_ext.LOMO if policy else torch.optim.SGD
    engine = engines.start(
        model,
        kind(model.parameters(), lr=LR),
        stage,
        policy,
        gradient_clipping=max_norm,
        gradient_accumulation_steps=accumulation,
        scheduler=SCHEDULER,
    )
    before, told = whole(model), []
    for step in range(STEPS):
        numbers = range(step * accumulation, (step + 1) * accumulation)
        losses = (loss_of(engine, number, dist.get_rank()) for number in numbers)
        for loss in [*losses] if how.endswith("ahead") else losses:
            engine.backward(loss) if how.startswith("engine") else loss.backward()
            is_boundary, lr = engine.is_gradient_accumulation_boundary(), engine.get_lr()[0]
            engine.step()
            told.append((is_boundary, lr, engine.micro_steps, engine.global_steps))
    norm = float(engine.get_global_grad_norm() or 0)
    return {"before": before, "after": whole(model), "told": told, "norm": norm}


def alone(accumulation: int, max_norm: float, lrs: list[float]) -> engines.Alone:

    def schedule(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"] = lrs[step]

    model = make()
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    return engines.alone(model, sgd, loss_of, STEPS, 2, max_norm, accumulation, schedule)


# All forward passes of a step come first, then their backward passes.
CASES = [(stage, "sharded", 2, 0.0, "tensor ahead") for stage in (0, 1, 2)]
CASES += [(2, "sharded", 2, 0.1, "engine ahead")]
CASES += [(stage, "fused", 1, 0.1 * (stage % 2), "engine") for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize("case", params([(case,) for case in CASES], [(c,) for c in CASES[2:6]]))
def test_a_loss_of_several_forward_passes_is_one_micro_batch(case):
    _, _, accumulation, max_norm, _ = case
    for got in worlds.run(2, train, *case):
        boundaries, lrs, *_ = zip(*got["told"], strict=True)
        assert [*boundaries] == ([False] * (accumulation - 1) + [True]) * STEPS
        assert got["told"][-1][2:] == (accumulation * STEPS, STEPS)
        assert len({*lrs}) > 1
        expected = alone(accumulation, max_norm, lrs[::accumulation])
        assert got["norm"] == pytest.approx(expected.norms[-1], rel=1e-5)
        check_each(got["after"], expected.after, got["before"], STEPS)


@pytest.mark.parametrize("stage, accumulation", [(0, 2), (1, 2), (2, 4), (3, 2)])
def test_steps_and_schedules_are_deepspeeds(stage, accumulation):
    ours, theirs = (
        worlds.run(2, train, stage, policy, accumulation, 0.0, "engine")
        for policy in ("sharded", "")
    )
    assert ours[0]["told"] == theirs[0]["told"]
