"""Ranks that use different parameters in a step: a mixture of experts without load balancing."""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.common import by_role, engines
from tests.common.ranks import identical
from tests.distributed import training_jobs
from tests.distributed.training_jobs import Training

STEPS = 5
WIDTH = 7


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, h: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        return h + sum(torch.tanh(self.each[i](h)) for i in chosen)


class Routed(nn.Module):
    """Two uses of the same experts; the second may be checkpointed, then both are."""

    def __init__(self, checkpointing: str | None) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.trunk = nn.Linear(5, WIDTH)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, first: list[int], second: list[int]) -> torch.Tensor:
        h = torch.tanh(self.trunk(x))
        for chosen in (first, second):
            if self.checkpointing is None:
                h = self.experts(h, chosen)
            else:
                reentrant = self.checkpointing == "reentrant"
                h = checkpoint(self.experts, h, chosen, use_reentrant=reentrant)
        return self.head(h).square().mean()


def make(checkpointing: str | None = None) -> Routed:
    torch.manual_seed(3)
    return Routed(checkpointing)


def chosen(step: int, rank: int, idle: bool) -> tuple[list[int], list[int]]:
    """The experts of a rank: expert 3 is used in some steps only, by all ranks; 4 by none.

    ``idle``: in one step rank 0 uses none at all.
    """
    if idle and step == 3 and rank == 0:
        return [], []
    return [rank % 3, 3][: 1 + step % 2], [(rank + step) % 3]


def loss_of(model: nn.Module, step: int, rank: int, run: "Routing") -> torch.Tensor:
    return model(engines.rows(step, rank, 4, 5), *chosen(step, rank, run.idle))


@dataclass(frozen=True)
class Routing(Training):
    bucket: int = 60
    persist: int = 0
    idle: bool = True


def _runs() -> dict[str, Routing]:
    made = {}
    for stage in (None, 0, 1, 2, 3):
        at = f"stage{stage}" if stage is not None else "plain"
        for bucket in (1, 60, 10**6):
            made[f"{at}-{bucket}"] = Routing("came", stage, bucket=bucket)
        made[f"{at}-reentrant"] = Routing("adalomo", stage, checkpointing="reentrant")
        # A segment without experts is not run again in backward, and DeepSpeed would wait for it.
        made[f"{at}-nonreentrant"] = Routing(
            "adalomo", stage, checkpointing="nonreentrant", idle=stage != 3
        )
        made[f"{at}-clip"] = Routing("came", stage, max_norm=0.1)
        made[f"{at}-clip-sharded"] = Routing("came", stage, "sharded", 0.1)
        made[f"{at}-muon"] = Routing("muon", stage, max_norm=0.1)
    made["stage3-apollo"] = Routing("apollo", 3)
    made["stage1-apollomini"] = Routing("apollomini", 1)
    return made


RUNS = _runs()


def train(run: Routing) -> dict[str, Any]:
    """Runs on this rank -> initial and final weights, and how often each parameter stepped."""
    model = make(run.checkpointing)
    if run.stage == 3:
        set_z3_leaf_modules(model, [Experts])
    engine = training_jobs.start(run, model)
    names = {p: n for n, p in model.named_parameters()}
    found = engines.trained(engine, functools.partial(loss_of, run=run), STEPS)
    found["steps"] = {names[p]: s["step"] for p, s in engine.optimizer.state.items()}
    found |= {"identical": identical(found["after"]), "told": by_role.told(engine.optimizer, model)}
    engine.destroy()
    return found


def reference(run: Routing, world: int, told: by_role.Told) -> tuple[engines.Alone, dict[str, int]]:
    """The same in one process, and how often each parameter had a gradient."""
    model = make()
    named = dict(model.named_parameters())
    optimizer = by_role.as_told(run.rule, run.hypers, told, named)
    used = Counter(
        name
        for step in range(STEPS)
        for name in {n for rank in range(world) for n in used_by(run, step, rank)}
    )
    loss = functools.partial(loss_of, run=run)
    return engines.alone(model, optimizer, loss, STEPS, world, run.max_norm), dict(used)


def used_by(run: Routing, step: int, rank: int) -> Iterator[str]:
    """The parameters that a rank's loss depends on."""
    own = {i for experts in chosen(step, rank, run.idle) for i in experts}
    for name, _ in make().named_parameters():
        if "each" not in name or int(name.split(".")[2]) in own:
            yield name
