"""Engines of small models on real ranks, their batches, and the same training in one process."""

from collections.abc import Callable
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_ext
from tests.common.plain import mean_step
from tests.common.ranks import whole

Loss = Callable[[Any, int, int], Tensor]  # of a model, the number of a micro-batch, and a rank
Edit = Callable[[Any, Any, int], None]  # of a model, its optimizer, and the step that follows
Weights = dict[str, Tensor]


def rows(number: int, rank: int, *shape: int) -> Tensor:
    """Normal numbers of a micro-batch; each rank's differ."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * number + rank))


def config(stage: int, policy: str = "", **keys: Any) -> dict[str, Any]:
    """A config by which small models are cut: few weights stay gathered, and buckets are small.

    ``policy`` "" is the default. Of ``keys``, those of ``zero`` go into ``zero_optimization``.
    """
    zero = {"stage": stage, "reduce_bucket_size": 50, "stage3_param_persistence_threshold": 10}
    usual = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,  # where an optimizer is torch's
        "zero_optimization": zero | keys.pop("zero", {}),
    }
    return usual | ({"ds_ext": {"gradient_policy": policy}} if policy else {}) | keys


class Fused:
    """``fuse_into_backward`` under the names of an engine, with accumulation."""

    def __init__(self, model: nn.Module, optimizer: Any, accumulation: int, **how: Any) -> None:
        self.module, self.optimizer, self.accumulation = model, optimizer, accumulation
        self.fused, self.backwards = ds_ext.fuse_into_backward(model, optimizer, **how), 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of one micro-batch."""
        self.fused.backward(loss / self.accumulation)
        self.backwards += 1

    def step(self) -> None:
        """Steps after the last micro-batch."""
        if self.backwards % self.accumulation == 0:
            self.optimizer.step()

    def get_global_grad_norm(self) -> float:
        return self.fused.norm

    def destroy(self) -> None:
        self.fused.remove()


def start(
    model: nn.Module, optimizer: Any, stage: int | None, policy: str = "", /, **keys: Any
) -> Any:
    """An engine by ``config``; ``fuse_into_backward`` under its names if ``stage`` is None."""
    if stage is not None:
        made = config(stage, policy, **keys)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]
    return Fused(
        model,
        optimizer,
        keys.get("gradient_accumulation_steps", 1),
        bucket_size=keys.get("zero", {}).get("reduce_bucket_size", 50),
        max_grad_norm=keys.get("gradient_clipping", 0.0),
        gradient_policy=policy or "fused",
    )


def unedited(model: Any, optimizer: Any, step: int) -> None:
    """What a script does between steps: nothing."""


def train(
    engine: Any, loss_of: Loss, steps: int | range, accumulation: int = 1, edit: Edit = unedited
) -> list[float]:
    """Trains by this rank's losses -> the norm of each step."""
    norms = []
    for step in range(steps) if isinstance(steps, int) else steps:
        edit(engine.module, engine.optimizer, step)
        for number in range(step * accumulation, (step + 1) * accumulation):
            engine.backward(loss_of(engine, number, dist.get_rank()))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def trained(engine: Any, loss_of: Loss, steps: int, *how: Any, **more: Any) -> dict[str, Any]:
    """The same -> whole weights before and after, and the norms."""
    before = whole(engine.module)
    norms = train(engine, loss_of, steps, *how, **more)
    return {"before": before, "after": whole(engine.module), "norms": norms}


class Alone(NamedTuple):
    before: Weights
    after: Weights
    norms: list[float]


def alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss, steps: int, world: int = 2,
    max_norm: float = 0.0, accumulation: int = 1, edit: Edit = unedited
) -> Alone:  # fmt: skip
    """The same in one process, by the mean over the ranks of ``world`` and the micro-batches."""
    before, norms = {n: p.detach().clone() for n, p in model.named_parameters()}, []
    for step in range(steps):
        edit(model, optimizer, step)
        numbers = range(step * accumulation, (step + 1) * accumulation)
        losses = [loss_of(model, number, rank) for number in numbers for rank in range(world)]
        norms.append(mean_step(optimizer, losses, max_norm))
    return Alone(before, {n: p.detach() for n, p in model.named_parameters()}, norms)
