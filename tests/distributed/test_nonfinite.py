"""A gradient that is not finite is as if it had not come, on every rank."""

from dataclasses import replace
from itertools import cycle
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from ds_ext.optimizer import OPTIMIZERS
from tests import worlds
from tests.common.choose import params
from tests.common.ranks import whole
from tests.distributed.zero_jobs import CASES, HYPERS, RULES, config


class Pieces(torch.nn.Module):
    """Three weights; the gradient of ``bad`` is NaN in one element on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.bad = torch.nn.Linear(5, 3, bias=False)
        self.other = torch.nn.Linear(5, 3, bias=False)
        self.twice = torch.nn.Linear(5, 5, bias=False)

    def forward(self, x, poison: float = 0.0, with_bad: bool = True):
        h = self.twice(torch.tanh(self.twice(x)))
        loss = self.other(h).square().sum()
        if not with_bad:
            return loss
        bad = self.bad(h.detach())
        mask = torch.zeros_like(bad)
        mask[0, 1] = poison
        return loss + (bad * (1 + mask)).sum()


BAD_STEPS = (0, 2, 3)  # steps in which the gradient of ``bad`` is not finite


def poisoned(rule: str, stage: int, is_sent: bool) -> tuple[Any, list[str]]:
    """Some steps in which a gradient on the last rank is not finite, or not there at all.

    -> the engine, and the names of the modules whose weights each step has changed.
    """
    torch.manual_seed(0)
    made = config(replace(CASES["adalomo"], stage=stage))
    model = Pieces()
    optimizer = OPTIMIZERS[rule](model.parameters(), **HYPERS[rule])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=made)
    values = cycle([torch.nan, torch.inf, -torch.inf])
    changed = []
    for step in range(5):
        before, poison = whole(model), 0.0
        if step in BAD_STEPS:
            poison = next(values) if dist.get_rank() == dist.get_world_size() - 1 else 0.0
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x, poison, is_sent or step not in BAD_STEPS))
        engine.step()
        after = whole(model)
        names = [n.split(".")[0] for n in after if not torch.equal(after[n], before[n])]
        changed.append(" ".join(sorted(names)))
    return engine, changed


def not_finite(rule: str, stage: int) -> dict[str, Any]:
    """A gradient of one parameter that is not finite in one rank's part, and that is not there."""
    engine, changed = poisoned(rule, stage, is_sent=True)
    fused, after = engine.optimizer.fused, whole(engine.module)
    optimizer = fused.optimizer
    steps = {engine.param_names[p].split(".")[0]: s["step"] for p, s in optimizer.state.items()}
    other, _ = poisoned(rule, stage, is_sent=False)
    without = whole(other.module)
    return {
        "skipped": fused.skipped,
        "changed": changed,
        "same": all(torch.equal(after[n], without[n]) for n in after),
        "steps": steps,
    }


POISONED = [(2, rule, stage) for rule in RULES for stage in (1, 3)]
POISONED += [(2, "sinkgd", 2), (2, "lomo", 0), (1, "adalomo", 3)]
POISONED += [(2, rule, 3) for rule in ("muon", "apollo", "apollomini", "scale")]
# By sums of its rows, of its run, and by votes: in a batch, and stepped alone.
QUICK_POISONED = [(2, "adalomo", 3), (2, "sinkgd", 2), (2, "lomo", 0), (2, "galoreadamw", 3)]


@pytest.mark.parametrize("ranks, rule, stage", params(POISONED, QUICK_POISONED))
def test_a_gradient_that_is_not_finite_is_as_if_it_had_not_come(ranks, rule, stage):
    for got in worlds.once(ranks, not_finite, rule, stage):
        assert got["skipped"] == len(BAD_STEPS) and got["same"]
        skipped = [step in BAD_STEPS for step in range(5)]
        assert got["changed"] == ["other twice" if x else "bad other twice" for x in skipped]
        assert got["steps"] == {"bad": 2, "other": 5, "twice": 5}
