"""Ranks that use different parameters in a step: a mixture of experts without load balancing."""

from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_ext
from tests.common import by_role
from tests.common.authors import ordinary
from tests.common.ranks import identical, whole
from tests.distributed.training_jobs import HYPERS

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


def loss_of(model: nn.Module, run: "Routing", step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 5, generator=generator), *chosen(step, rank, run.idle))


@dataclass(frozen=True)
class Routing:
    rule: str
    stage: int | None
    checkpointing: str | None = None
    policy: str = "fused"
    max_norm: float = 0.0
    bucket: int = 60
    idle: bool = True


def _runs() -> dict[str, Routing]:
    made = {}
    for stage in (None, 0, 1, 2, 3):
        at = f"stage{stage}" if stage is not None else "plain"
        for bucket in (1, 60, 10**6):
            made[f"{at}-{bucket}"] = Routing("came", stage, bucket=bucket)
        made[f"{at}-reentrant"] = Routing("adalomo", stage, "reentrant")
        # A segment without experts is not run again in backward, and DeepSpeed would wait for it.
        made[f"{at}-nonreentrant"] = Routing("adalomo", stage, "nonreentrant", idle=stage != 3)
        made[f"{at}-clip"] = Routing("came", stage, max_norm=0.1)
        made[f"{at}-clip-sharded"] = Routing("came", stage, None, "sharded", 0.1)
        made[f"{at}-muon"] = Routing("muon", stage, max_norm=0.1)
    made["stage3-apollo"] = Routing("apollo", 3)
    made["stage1-apollomini"] = Routing("apollomini", 1)
    return made


RUNS = _runs()


def start(run: Routing, model: nn.Module):
    optimizer = by_role.made(run.rule, model, HYPERS[run.rule] | {"weight_decay": 0.1})
    if run.stage is None:
        return ds_ext.fuse_into_backward(
            model,
            optimizer,
            bucket_size=run.bucket,
            max_grad_norm=run.max_norm,
            gradient_policy=run.policy,
        )
    if run.stage == 3:
        set_z3_leaf_modules(model, [Experts])
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": run.max_norm,
        "zero_optimization": {
            "stage": run.stage,
            "reduce_bucket_size": run.bucket,
            "stage3_param_persistence_threshold": 0,
        },
        "ds_ext": {"gradient_policy": run.policy},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]


def train(run: Routing) -> dict[str, Any]:
    """Runs on this rank -> initial and final weights, and how often each parameter stepped."""
    model = make(run.checkpointing)
    engine = start(run, model)
    before = whole(model)
    names = {p: n for n, p in model.named_parameters()}
    for step in range(STEPS):
        if run.stage is None:
            engine.backward(loss_of(model, run, step, dist.get_rank()))
        else:
            engine.backward(loss_of(engine, run, step, dist.get_rank()))
        (engine.optimizer if run.stage is None else engine).step()
    steps = {names[p]: s["step"] for p, s in engine.optimizer.state.items()}
    after = whole(model)
    made = {"before": before, "after": after, "steps": steps, "identical": identical(after)}
    made["told"] = by_role.told(engine.optimizer, model)
    (engine.remove if run.stage is None else engine.destroy)()
    return made


def reference(run: Routing, world: int, told: by_role.Told) -> tuple[nn.Module, dict[str, int]]:
    """The same in one process -> the model, and how often each parameter had a gradient."""
    model = make()
    if run.rule in by_role.MATRICES:
        named = dict(model.named_parameters())
        optimizer = by_role.as_told(run.rule, HYPERS[run.rule], told, named)
    else:
        groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
        optimizer = ordinary(run.rule, groups, HYPERS[run.rule])
    steps = dict.fromkeys(dict(model.named_parameters()), 0)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, run, step, rank) for rank in range(world)) / world).backward()
        for n, p in model.named_parameters():
            steps[n] += p.grad is not None
        if run.max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.max_norm)
        optimizer.step()
    return model, steps
