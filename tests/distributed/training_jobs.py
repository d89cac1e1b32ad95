"""What a training script sets beside the optimizer: runs on real ranks, and their reference.

Clipping, accumulation and gradient policy, by stage, with dropout on."""

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.common import by_role, engines, models
from tests.common.hypers import FOR_ALL, TRAINED, changed
from tests.common.ranks import identical, whole

STEPS = 4
BUCKET = 500
HYPERS = changed(TRAINED, lomo={"lr": 0.3}, adafactor={"lr": 0.03})  # few steps: large updates


@dataclass(frozen=True)
class Training:
    """One run: ``how`` names the way that backward is called and accumulation is told."""

    rule: str = "lomo"
    stage: int | None = 3  # None: fuse_into_backward, no engine
    policy: str | None = None
    max_norm: float = 0.0
    clip_value: float = 0.0
    clip_mode: str = "exact"
    accumulation: int = 1
    checkpointing: str | None = None
    how: str = "engine"
    extra: dict[str, Any] = field(default_factory=dict)  # further parts of the config
    own: dict[str, Any] = field(default_factory=dict)  # hyper-parameters
    is_json: bool = False  # the config names the optimizer; else it is an object
    zero_init: bool = False
    dropout: float = 0.3
    bucket: int = BUCKET
    persist: int = 30

    @property
    def settings(self) -> tuple[Any, ...]:
        """All that may interact, for ``choose.pairs``."""
        clips = self.max_norm > 0, self.clip_value > 0, self.clip_mode
        passes = self.accumulation, self.checkpointing, self.how
        built = self.is_json, self.zero_init, self.bucket, self.persist, (*self.extra,)
        decays = self.hypers["weight_decay"] > 0
        return self.rule, self.stage, self.policy, decays, *clips, *passes, *built

    @property
    def section(self) -> dict[str, Any]:
        made = {"clip_value": self.clip_value, "clip_mode": self.clip_mode}
        return made | ({"gradient_policy": self.policy} if self.policy else {})

    @property
    def hypers(self) -> dict[str, Any]:
        return HYPERS[self.rule] | {"weight_decay": 0.1} | self.own


def _at(stage: int | None) -> str:
    return "plain" if stage is None else f"stage{stage}"


def _runs() -> dict[str, Training]:
    made = {}
    for stage, policy in itertools.product((None, 0, 1, 2, 3), ("fused", "sharded")):
        kinds = ["none", "reentrant", "nonreentrant"] if stage in (0, 2, 3) else ["none"]
        kinds += ["deepspeed"] if stage in (1, 3) else []
        for kind in kinds:
            checkpointing = None if kind == "none" else kind
            made[f"clip-{_at(stage)}-{policy}-{kind}"] = Training(
                stage=stage, policy=policy, max_norm=0.5, checkpointing=checkpointing
            )
    for stage, policy in itertools.product((0, 3), ("fused", "sharded")):
        made[f"value-stage{stage}-{policy}"] = Training(stage=stage, policy=policy, clip_value=0.02)
    for stage, n, norm in itertools.product((0, 2, 3), (1, 2, 3), (0.0, 0.4)):
        name = f"accumulation{n}-stage{stage}" + ("-clip" if norm else "")
        made[name] = Training("came", stage, "sharded", norm, accumulation=n)
    for stage in (None, 1):
        name = f"accumulation2-{_at(stage)}-clip"
        made[name] = Training("came", stage, "sharded", 0.4, accumulation=2)
    for stage in (None, 0, 3):
        made[f"previous-{_at(stage)}"] = Training(stage=stage, max_norm=0.5, clip_mode="previous")
    for rule in FOR_ALL:
        made[f"{rule}-clip"] = Training(rule, 3, "fused", 0.3)
    # Rules of matrices: Muon in all ways at all stages, the others in each way at one.
    ways: dict[str, dict[str, Any]] = {
        "fused": {"policy": "fused", "max_norm": 0.3},
        "sharded": {"policy": "sharded", "max_norm": 0.3},
        "previous": {"max_norm": 0.3, "clip_mode": "previous"},
        "value": {"clip_value": 0.02},
        "accumulation2": {"accumulation": 2},
        "accumulation2-clip": {"policy": "sharded", "accumulation": 2, "max_norm": 0.3},
    }
    stages = (3, 0, 1, 2, None)
    for i, (way, more) in enumerate(ways.items()):
        for stage in stages:
            if stage is not None or way != "accumulation2":
                made[f"muon-{way}-{stage}"] = Training("muon", stage, **more)
        for rule, stage in (("apollo", stages[i % 4]), ("apollomini", stages[(i + 1) % 4])):
            made[f"{rule}-{way}-{stage}"] = Training(rule, stage, **more)
    made["apollomini-fused-3"] = Training("apollomini", 3, policy="fused", max_norm=0.3)
    made["deepspeed-stage1"] = Training(stage=1, policy="fused", checkpointing="deepspeed")
    made["scale"] = Training(max_norm=0.5, how="scale")
    made["tensor backward"] = Training(max_norm=0.5, how="tensor", policy="sharded")
    made["tensor backward of many"] = Training("came", accumulation=3, how="tensor")
    for stage in (1, 3):
        made[f"boundary-{stage}"] = Training(
            "came", stage, None, 0.4, accumulation=2, how="boundary"
        )
        made[f"unmanaged-{stage}"] = Training(
            "came", stage, None, 0.4, accumulation=2, how="unmanaged",
            extra={"managed_gradient_accumulation": False},
        )  # fmt: skip
    for stage in (0, 1):
        made[f"no_sync-{stage}"] = Training("came", stage, None, 0.4, accumulation=2, how="no_sync")
    return made


RUNS = _runs()


def config(run: Training) -> dict[str, Any]:
    told = run.how in ("engine", "tensor", "scale")
    usual = {
        "gradient_accumulation_steps": run.accumulation if told else 1,
        "gradient_clipping": run.max_norm,
        "zero": {
            "reduce_bucket_size": run.bucket,
            "stage3_param_persistence_threshold": run.persist,
        },
        "ds_ext": run.section,
    }
    if run.is_json:
        kind = f"ds_ext.{run.rule}" if run.rule in by_role.MATRICES else run.rule.upper()
        usual["optimizer"] = {"type": kind, "params": run.hypers}
    return engines.config(run.stage, **usual | run.extra)


def loss_of(model, run: Training, step: int, part: int, rank: int, world: int) -> torch.Tensor:
    """The loss of one micro-batch of a rank; random numbers are its own."""
    torch.manual_seed(1000 * step + 10 * part + rank)
    return model(models.batch(10 * step + part, world)[rank], step=step)


def start(run: Training, model: torch.nn.Module):
    optimizer = None if run.is_json else by_role.made(run.rule, model, run.hypers)
    if run.stage is None:
        return engines.Fused(
            model,
            optimizer,
            run.accumulation,
            bucket_size=run.bucket,
            max_grad_norm=run.max_norm,
            clip_value=run.clip_value,
            clip_mode=run.clip_mode,
            gradient_policy=run.policy or "fused",
        )
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config(run))[0]


def backward(engine, run: Training, loss: torch.Tensor, part: int) -> None:
    """One micro-batch's backward pass and what follows it, as ``run.how`` says."""
    last = part == run.accumulation - 1
    if run.how in ("engine", "tensor", "scale"):
        if run.how == "engine":
            engine.backward(loss)
        else:
            (engine.scale(loss) if run.how == "scale" else loss).backward()
        engine.step()
        return
    loss = loss / run.accumulation
    with engine.no_sync() if run.how == "no_sync" and not last else contextlib.nullcontext():
        if run.how == "boundary":  # as accelerate does
            engine.set_gradient_accumulation_boundary(last)
        engine.backward(loss, scale_wrt_gas=False)
    if last:
        engine.step()


def train(run: Training) -> dict[str, Any]:
    """Runs on this rank -> initial and final weights, norms, and the metrics of the last step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = models.make(run.checkpointing, dropout=run.dropout)
    engine = start(run, model)
    before = whole(model)
    norms = []
    for step in range(STEPS):
        for part in range(run.accumulation):
            backward(engine, run, loss_of(engine, run, step, part, rank, world), part)
        norms.append(engine.get_global_grad_norm())
        assert all(p.grad is None for p in model.parameters())
    after = whole(model)
    fused = engine.fused if run.stage is None else engine.optimizer.fused
    result = {"before": before, "after": after, "norms": norms, "metrics": fused.metrics}
    result["told"] = by_role.told(engine.optimizer, model)
    engine.destroy()
    return result


def alone(
    run: Training, world: int, told: by_role.Told, model: nn.Module | None = None
) -> engines.Alone:
    """One process with the whole model and the batches of all ranks, and torch's clipping."""
    model = model or models.make(dropout=run.dropout)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = by_role.as_told(run.rule, run.hypers, told, dict(model.named_parameters()))
    parts, norms = range(run.accumulation), []
    for step in range(STEPS):
        losses = [loss_of(model, run, step, i, r, world) for r in range(world) for i in parts]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        for p in model.parameters():  # gradients of one loss may share memory: clip each once
            p.grad = None if p.grad is None else p.grad.clone()
        clip(run, model, norms)
        optimizer.step()
    return engines.Alone(before, {n: p.detach() for n, p in model.named_parameters()}, norms)


def clip(run: Training, model: nn.Module, norms: list[float]) -> None:
    params = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in params])
    if run.max_norm:
        is_previous = run.clip_mode == "previous" and norms
        known = torch.tensor(norms[-1]) if is_previous else norm
        torch.nn.utils.clip_grads_with_norm_(params, run.max_norm, known)
    if run.clip_value:
        share = sum(float((p.grad.abs() > run.clip_value).sum()) for p in params)
        assert 0.01 < share / sum(p.numel() for p in params) < 1  # or it would show nothing
        torch.nn.utils.clip_grad_value_(params, run.clip_value)
    norms.append(float(norm))


# Ranks that use different parameters in a step: a mixture of experts without load balancing.
ROUTED_STEPS = 5
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


def routed_loss(model: nn.Module, step: int, rank: int, run: "Routing") -> torch.Tensor:
    return model(engines.rows(step, rank, 4, 5), *chosen(step, rank, run.idle))


@dataclass(frozen=True)
class Routing(Training):
    bucket: int = 60
    persist: int = 0
    idle: bool = True


def _routed() -> dict[str, Routing]:
    made = {}
    for stage in (None, 0, 1, 2, 3):
        at = _at(stage)
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


ROUTED = _routed()


def train_routed(run: Routing) -> dict[str, Any]:
    """Runs on this rank -> initial and final weights, and how often each parameter stepped."""
    model = make(run.checkpointing)
    if run.stage == 3:
        set_z3_leaf_modules(model, [Experts])
    engine = start(run, model)
    names = {p: n for n, p in model.named_parameters()}
    found = engines.trained(engine, functools.partial(routed_loss, run=run), ROUTED_STEPS)
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
        for step in range(ROUTED_STEPS)
        for name in {n for rank in range(world) for n in used_by(run, step, rank)}
    )
    loss = functools.partial(routed_loss, run=run)
    return engines.alone(model, optimizer, loss, ROUTED_STEPS, world, run.max_norm), dict(used)


def used_by(run: Routing, step: int, rank: int) -> Iterator[str]:
    own = {i for experts in chosen(step, rank, run.idle) for i in experts}
    for name, _ in make().named_parameters():
        if "each" not in name or int(name.split(".")[2]) in own:
            yield name
