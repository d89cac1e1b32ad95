"""Training of models to which ``fully_shard`` (FSDP2) was applied: jobs on real ranks."""

from collections.abc import Callable
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
from tests.common.ranks import full, identical, whole
from tests.distributed import training_jobs
from tests.distributed.training_jobs import STEPS, Training

UNITS = ("up", "down", "shared", "frozen", "unused", "odd", "conv1", "norm")


def zoo(checkpointing: str | None = None, kind: type[models.Zoo] = models.Zoo) -> models.Zoo:
    """The small model with every habit; ``fully_shard`` takes no parameters of 0 dimensions."""
    torch.manual_seed(7)
    model = kind(checkpointing)
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


def local(model: nn.Module) -> Tensor:
    return torch.cat([p.to_local().detach().flatten() for p in model.parameters()])


def train(run: Training, is_apart: bool = False, by_fsdp: bool = False) -> dict[str, Any]:
    """Trains without a stage, by ``optimizer.step()`` alone if ``run.how`` is "plain".

    ``is_apart``: without the two gradients that share memory. ``by_fsdp``: FSDP2 keeps the
    gradients of micro-batches, and sums them with the last one.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    model: Any = shard((apart if is_apart else zoo)(run.checkpointing))
    if run.how == "plain":
        optimizer, engine = by_role.made(run.rule, model, run.hypers), None
    else:
        engine = training_jobs.start(run, model)
        optimizer = engine.optimizer
    before, norms, moved, twice = whole(model), [], [], False
    for step in range(STEPS):
        for part in range(run.accumulation):
            if by_fsdp:
                model.set_requires_gradient_sync(part == run.accumulation - 1)
            held = local(model)
            loss = training_jobs.loss_of(model, run, step, part, rank, world)
            if engine:
                engine.backward(loss)
                twice |= bool(engine.fused.state.kept.keys() & engine.fused.buckets.parts)
            else:
                optimizer.zero_grad()
                loss.backward()
            moved.append(not torch.equal(held, local(model)))
        optimizer.step()
        norms.append(engine.fused.norm if engine else None)
    after, names = whole(model), {p: n for n, p in model.named_parameters()}
    return {
        "before": before,
        "after": after,
        "identical": identical(after),
        "norms": norms,
        "moved in backward": moved,
        "held twice": twice,
        "steps": {names[p]: state["step"] for p, state in optimizer.state.items()},
        **by_role.told(optimizer, model),
    }


BATCHES = 6  # of a step, of all ranks together: 1, 2, 3 or 6 of them see the same mean gradient


def resume(
    rule: str, hypers: dict[str, Any], fused: bool, folder: str, first: int, last: int
) -> dict[str, Any]:
    """Steps ``first`` to ``last``, from what is saved in a folder if there is any; then saves."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = shard(zoo(kind=models.Rows))
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
        model(mine.flatten(0, 1), step=step).backward()
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
