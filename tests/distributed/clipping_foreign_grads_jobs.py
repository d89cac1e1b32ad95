"""Gradients of parameters that ds_ext does not step, around exact clipping: jobs."""

import contextlib
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import ds_ext
from tests.common.ranks import message
from tests.distributed.skipped_batches_jobs import whole

CLIP = 0.05
LR = 0.5
STEPS = 3


class Body(nn.Module):
    """Its second layer is in a reentrant segment, if ``reentrant``."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return checkpoint(self.second, h, use_reentrant=True) if self.reentrant else self.second(h)


def make(reentrant: bool) -> tuple[Body, nn.Module, nn.Module]:
    """A body, a second model, and a head that torch trains."""
    torch.manual_seed(1)
    return Body(reentrant), nn.Linear(6, 8), nn.Linear(8, 3)


def loss_of(body: nn.Module, second: nn.Module, head: nn.Module, x: Tensor) -> Any:
    hidden = body(x) * torch.tanh(second(x))
    hidden.retain_grad()
    return head(hidden).square().sum(), hidden


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def reference(world: int, reentrant: bool) -> list[Any]:
    """Of each step: the other gradients of each rank, and the weights of both models after it."""
    body, second, head = make(reentrant)
    told = []
    for step in range(STEPS):
        others = []
        for rank in range(world):
            x = batch(step, rank).requires_grad_()
            loss, hidden = loss_of(body, second, head, x)
            loss.backward()
            others.append([x.grad, hidden.grad, head.weight.grad, head.bias.grad])
            head.zero_grad()
        for model in (body, second):
            for p in model.parameters():
                p.grad /= world
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            torch.optim.SGD(model.parameters(), lr=LR).step()
            model.zero_grad()
        told.append((others, [p.detach().clone() for m in (body, second) for p in m.parameters()]))
    return told


def engines(stage: int, reentrant: bool, kind: Any = ds_ext.LOMO) -> list[Any]:
    """The same by two engines, the second with an optimizer of ``kind``."""
    *models, head = make(reentrant)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 10,
            "reduce_bucket_size": 50,
        },
    }
    body, second = (
        deepspeed.initialize(model=m, optimizer=kind(m.parameters(), lr=LR), config=config)[0]
        for m, kind in zip(models, (ds_ext.LOMO, kind), strict=True)
    )
    told = []
    for step in range(STEPS):
        x = batch(step, dist.get_rank()).requires_grad_()
        loss, hidden = loss_of(body, second, head, x)
        body.backward(loss)
        others = [g.clone() for g in (x.grad, hidden.grad, head.weight.grad, head.bias.grad)]
        refuse_to_clip_both(models[0], head)
        body.step()
        second.step()
        told.append((others, [p for m in models for p in whole(m)]))
    return told


def refuse_to_clip_both(body: nn.Module, head: nn.Module) -> None:
    """Clips both together, where only the first rank has gradients of the head."""
    if dist.get_rank():
        head.zero_grad()
    both = [*body.parameters(), *head.parameters()]
    said = message(lambda: torch.nn.utils.clip_grad_norm_(both, CLIP))
    assert "Clip the others by a call of their own" in said, said
    head.zero_grad()


def fused(reentrant: bool) -> list[Any]:
    """The same by FSDP2, without an engine."""
    *models, head = make(reentrant)
    made = []
    for model in models:
        for layer in [*model.children(), model]:
            fully_shard(layer)
        optimizer = ds_ext.LOMO(model.parameters(), lr=LR)
        made.append((ds_ext.fuse_into_backward(model, optimizer, max_grad_norm=CLIP), optimizer))
    told = []
    for step in range(STEPS):
        x = batch(step, dist.get_rank()).requires_grad_()
        loss, hidden = loss_of(*models, head, x)
        made[step % 2][0].backward(loss)
        others = [g.clone() for g in (x.grad, hidden.grad, head.weight.grad, head.bias.grad)]
        refuse_to_clip_both(models[0], head)
        for _, optimizer in made:
            optimizer.step()
        weights = [p.full_tensor().detach().clone() for m in models for p in m.parameters()]
        told.append((others, weights))
    return told


def beside_deepspeeds(stage: int) -> str:
    """What is said where the second engine is DeepSpeed's own."""
    return message(lambda: engines(stage, False, torch.optim.SGD))


def failed(stage: int, discard: bool) -> list[Any]:
    """The weights before and after an error in the measuring pass, and after a step."""
    body, _, _ = make(reentrant=False)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
    }
    optimizer = ds_ext.LOMO(body.parameters(), lr=LR)
    engine = deepspeed.initialize(model=body, optimizer=optimizer, config=config)[0]
    before = whole(body)

    def fail(grad: Tensor) -> None:
        raise KeyboardInterrupt

    hidden = engine(batch(7, dist.get_rank()))
    inner = hidden * 2
    inner.register_hook(fail)
    hooked = engine(batch(8, dist.get_rank()))
    with contextlib.suppress(KeyboardInterrupt):
        engine.backward((hooked * hidden + inner).sum())
    if discard:
        engine.zero_grad()
    between = whole(body)
    engine.backward(engine(batch(0, dist.get_rank())).square().sum())
    engine.step()
    return [before, between, whole(body), [engine.micro_steps, engine.global_steps]]
