"""Training of models to which ``fully_shard`` (FSDP2) was applied: jobs on real ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ds_ext
from ds_ext.optimizer import OPTIMIZERS
from tests.common import by_role, models
from tests.common.ranks import identical, message
from tests.distributed import storing_jobs

STEPS = 4

UNITS = ("up", "down", "shared", "frozen", "unused", "odd", "conv1", "norm")


@dataclass
class Case:
    """One training run, compared by the test with a reference in one process."""

    rule: str
    hypers: Mapping[str, Any]
    how: str = "fused"  # "sharded": that policy; "plain": optimizer.step() alone
    checkpointing: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of fully_shard
    bucket: int | None = 300


def zoo(checkpointing: str | None = None) -> models.Zoo:
    """The small model with every habit; ``fully_shard`` takes no parameters of 0 dimensions."""
    model = models.make(checkpointing)
    model.gain = nn.Parameter(model.gain.detach().view(1))
    return model


def apart(checkpointing: str | None = None) -> models.Zoo:
    """The same, without the two gradients that share memory: torch adds up such ones wrongly."""
    model = zoo(checkpointing)
    model.offsets.requires_grad_(False)
    return model


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Applies ``fully_shard`` to layers and the model, on a mesh of all ranks if none is given."""
    options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))} | options
    for name in UNITS:
        fully_shard(getattr(model, name), **options)
    return fully_shard(model, **options)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {n: full(p).clone() for n, p in model.named_parameters()}


def full(x: Tensor) -> Tensor:
    """A whole tensor of one that may be in parts."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def local(model: nn.Module) -> Tensor:
    """A copy of what this rank holds of the weights, flat."""
    return torch.cat([p.to_local().detach().flatten() for p in model.parameters()])


def train(case: Case) -> dict[str, Any]:
    """Weights before and after, norms, and how often each parameter was stepped."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = shard(zoo(case.checkpointing), **case.options)
    optimizer, fused = by_role.made(case.rule, model, case.hypers), None
    if case.how != "plain":
        policy = "sharded" if case.how == "sharded" else "fused"
        fused = ds_ext.fuse_into_backward(
            model, optimizer, bucket_size=case.bucket, gradient_policy=policy
        )
    before, norms, moved = whole(model), [], []
    for step in range(STEPS):
        held = local(model)
        loss = model(models.batch(step, world)[rank], step=step)
        optimizer.zero_grad()
        loss.backward()
        moved.append(not torch.equal(held, local(model)))
        optimizer.step()
        norms.append(fused.norm if fused else None)
    after, names = whole(model), {p: n for n, p in model.named_parameters()}
    return {
        "before": before,
        "after": after,
        "identical": identical(after),
        "norms": norms,
        "moved in backward": moved,
        "steps": {names[p]: state["step"] for p, state in optimizer.state.items()},
        **by_role.told(optimizer, model),
    }


# How gradients are clipped and kept, by what fuse_into_backward is given. Those that FSDP2 keeps
# over micro-batches are summed over the ranks with the last one; the others with each.
CLIPPED = {"max_grad_norm": 0.3}
BY_STEP: dict[str, dict[str, Any]] = {
    "fused": {},
    "clipped": CLIPPED,
    "sharded": CLIPPED | {"gradient_policy": "sharded"},
    "by value": {"clip_value": 0.003},
}


def accumulate(
    name: str, by_fsdp: bool, micro: int, checkpointing: str | None, rule: str
) -> dict[str, Any]:
    """Steps of several micro-batches, or of one; when weights moved, and the norms."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = shard(apart(checkpointing))
    optimizer = by_role.made(rule, model, {"lr": 0.05})
    fused = ds_ext.fuse_into_backward(model, optimizer, bucket_size=300, **BY_STEP[name])
    before, norms, moved, twice = whole(model), [], [], False
    for step in range(STEPS):
        for i in range(micro):
            if by_fsdp:
                model.set_requires_gradient_sync(i == micro - 1)
            held = local(model)
            loss = model(models.batch(micro * step + i, world)[rank], step=step)
            fused.backward(loss / micro)
            moved.append(not torch.equal(held, local(model)))
            twice |= bool(fused.state.kept.keys() & fused.buckets.parts)
        optimizer.step()
        norms.append(fused.norm)
    after = whole(model)
    told = {"held twice": twice, "norms": norms, "moved in backward": moved}
    told |= {"identical": identical(after), "told": by_role.told(optimizer, model)}
    return {"before": before, "after": after, **told}


def misused() -> dict[str, Any]:
    """Errors of what comes too late for gradients that are used in backward; whether any moved."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = shard(zoo())
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.05)
    ds_ext.fuse_into_backward(model, optimizer, bucket_size=300)
    held = local(model)
    loss = model(models.batch(0, world)[rank])
    told = {"scaler": message(lambda: torch.amp.GradScaler("cpu").scale(loss), RuntimeError)}
    model.set_requires_gradient_sync(False)
    model(models.batch(0, world)[rank]).backward()
    told["kept"] = message(optimizer.step, RuntimeError)
    return told | {"moved": not torch.equal(held, local(model))}


BATCHES = 6  # of a step, of all ranks together: 1, 2, 3 or 6 of them see the same mean gradient


def resume(
    rule: str, hypers: dict[str, Any], fused: bool, folder: str, first: int, last: int
) -> dict[str, Any]:
    """Steps ``first`` to ``last``, from what is saved in a folder if there is any; then saves."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = shard(zoo())
    if hypers.get("weight_update"):
        model.bfloat16()
    optimizer = OPTIMIZERS[rule].for_model(model, **hypers)
    if fused:
        ds_ext.fuse_into_backward(model, optimizer, bucket_size=300)
    before, loaded = whole(model), {}
    if first:
        weights, states = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": states}
        checkpoint.load(saved, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        loaded = numbers(get_state_dict(model, optimizer)[1])
    for step in range(first, last):
        mine = models.batch(step, BATCHES).tensor_split(world)[rank]
        optimizer.zero_grad()
        torch.stack([model(tokens, step=step) for tokens in mine]).mean().backward()
        optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    spread = numbers(states, of=lambda x: isinstance(x, DTensor))
    told = {"spread": any(x is True for x in spread.values()), "loaded": loaded}
    told |= {"saved": numbers(states)}
    return {"before": before, "after": whole(model)} | told


def copied(x: Tensor) -> Tensor:
    """A copy of a whole tensor, of a dtype that gloo need not know."""
    wide = x if x.is_floating_point() else x.to(torch.int64)
    return full(wide).to(x.dtype, copy=True)


def numbers(
    states: dict[str, Any], *above: str, of: Callable[[Tensor], Any] = copied
) -> dict[tuple[str, ...], Any]:
    """All that states hold, in one level, of tensors what ``of`` gives."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in states.items():
        if isinstance(value, dict):
            found |= numbers(value, *above, key, of=of)
        elif key != "param_groups":
            found[(*above, key)] = of(value) if isinstance(value, Tensor) else value
    return found


def failing(rule: str) -> tuple[int, list[str]]:
    """``failing_one_by_one`` for the optimizer's state dicts."""
    model = shard(zoo())
    optimizer = OPTIMIZERS[rule].for_model(model)
    ds_ext.fuse_into_backward(model, optimizer, bucket_size=300)
    model(models.batch(0, 2)[dist.get_rank()]).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    return storing_jobs.failing_one_by_one(
        {"save": optimizer.state_dict, "load": lambda: optimizer.load_state_dict(saved)}
    )
