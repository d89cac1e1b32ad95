"""Bad gradients of the optimizers that step matrices one by one, on real ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_ext
from tests import worlds
from tests.common import engines
from tests.common.choose import pairs, params
from tests.common.ranks import whole

LOW_RANK = {"rank": 4, "update_proj_gap": 2}
HYPERS: dict[str, dict[str, Any]] = {"GaLoreAdamW": LOW_RANK, "APOLLO": LOW_RANK, "Muon": {}}
BAD = (0, 3)  # the steps with a bad gradient, as GaLore's first basis and its next one are due
STEPS = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(16, 24, bias=False), nn.LayerNorm(24)
        self.down = nn.Linear(24, 12)

    def forward(self, x: Tensor, is_bad: bool = False) -> Tensor:
        x = self.up(x)
        if is_bad:
            x.register_hook(lambda grad: grad * torch.nan)
        return self.down(self.norm(x.tanh())).square().mean()


def trained(
    name: str, stage: int, policy: str, clip: float, accumulation: int, is_skipped: bool
) -> tuple[dict[str, Tensor], int]:
    """The weights, and the number of skipped steps, after steps with bad ones or without them.

    Only one micro-batch of one rank has a bad gradient, of one matrix.
    """
    torch.manual_seed(0)
    model, rank = Model(), dist.get_rank()
    optimizer = getattr(ds_ext, name).for_model(model, lr=0.01, **HYPERS[name])
    more = {"gradient_accumulation_steps": accumulation, "gradient_clipping": clip}
    engine = engines.start(model, optimizer, stage, policy, **more)
    for step in range(STEPS):
        if is_skipped and step in BAD:
            continue
        for number in range(accumulation):
            is_bad = step in BAD and (number, rank) == (0, 1)
            x = engines.rows(step * accumulation + number, rank, 4, 16)
            engine.backward(engine(x, is_bad))
            engine.step()
    return whole(model), engine.optimizer.fused.skipped_steps


HOW = [("", 1.0, 1), ("", 1.0, 2), ("sharded", 0.0, 2), ("projected", 0.0, 2)]
CASES = [(name, stage) for name in HYPERS for stage in range(4)]
QUICK = [("GaLoreAdamW", 3), ("Muon", 2)]


QUICK_SKIPPED = [(*case, how) for case, how in zip(QUICK, HOW[1:3], strict=True)]
SKIPPED = pairs(
    [(*case, how) for case in CASES for how in HOW[: 4 if case[0] == "GaLoreAdamW" else 3]],
    lambda case: case,
    QUICK_SKIPPED,
)


@pytest.mark.parametrize("name, stage, how", params(SKIPPED, QUICK_SKIPPED))
def test_a_step_skipped_for_one_matrix_leaves_no_trace(name, stage, how):
    runs = worlds.run(2, trained, name, stage, *how, False)
    for (got, skipped), (without, none) in zip(
        runs, worlds.run(2, trained, name, stage, *how, True), strict=True
    ):
        assert (skipped, none) == (len(BAD), 0)
        assert all(torch.equal(p, without[n]) for n, p in got.items())


@pytest.mark.parametrize("name, stage", params(CASES, QUICK))
@worlds.on(2)
def test_without_clipping_only_the_bad_matrix_is_skipped(name, stage):
    torch.manual_seed(0)
    model = Model()
    optimizer = getattr(ds_ext, name).for_model(model, lr=0.01, **HYPERS[name])
    engine = engines.start(model, optimizer, stage)
    before = whole(model)
    engine.backward(engine(engines.rows(0, dist.get_rank(), 4, 16), dist.get_rank() == 1))
    engine.step()
    for n, p in whole(model).items():
        assert p.isfinite().all() and torch.equal(p, before[n]) == (n == "up.weight"), n
    assert engine.optimizer.fused.skipped == 1
