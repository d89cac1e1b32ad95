"""Jobs in which a batch is skipped, on real ranks: what follows must not know of it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_ext
from tests.common import engines as common
from tests.common.ranks import whole

LR = 0.1
BAD = 77  # the number of the batch that is skipped
# How a batch ends, and who then discards it.
HOW = (
    ("backward", "engine"),
    ("forward", "adapter"),
    ("failed backward", "module"),
    ("failed forward", "engine"),
    ("backward", "optimizer"),
    ("failed backward", "engine"),
)


class Failure(RuntimeError):
    """Such as out of memory."""


class Twice(nn.Module):
    """Its middle is used twice, in checkpointed segments; can fail in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def segment(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.middle(h))

    def forward(self, x: torch.Tensor, fail: str = "") -> torch.Tensor:
        h = torch.tanh(self.first(x))
        h = checkpoint(self.segment, h, use_reentrant=True)
        if fail == "failed forward":
            raise Failure
        if fail == "failed backward":
            h.register_hook(_fail)
        h = checkpoint(self.segment, h, use_reentrant=True)
        return self.last(h).square().sum()


def _fail(grad: torch.Tensor) -> None:
    raise Failure


def make() -> Twice:
    torch.manual_seed(0)
    return Twice()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def skip(
    forward: Callable[..., torch.Tensor],
    backward: Callable[[torch.Tensor], object],
    zero_grad: Callable[[], None],
    how: str,
    rank: int,
) -> None:
    """A batch that is given up: after forward, after backward, or in the middle of one."""
    try:
        loss = forward(batch(BAD, rank) * 3, how)
        if how != "forward":
            backward(loss)
    except Failure:
        pass
    zero_grad()


def engines(stage: int, policy: str, accumulation: int, max_norm: float) -> list[dict[str, Any]]:
    """A skipped batch of each kind and a step after it -> what the steps did, and left behind."""
    rank = dist.get_rank()
    model = make()
    optimizer = ds_ext.LOMO(model.parameters(), lr=LR)
    engine = common.start(
        model,
        optimizer,
        stage,
        policy,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=max_norm,
        zero={"reduce_bucket_size": 70, "overlap_comm": True},
    )
    zero_grads = {
        "engine": engine.zero_grad,
        "adapter": engine.optimizer.zero_grad,
        "optimizer": optimizer.zero_grad,
        "module": engine.module.zero_grad,
    }
    last, told = whole(model), []
    for step, (how, by) in enumerate(HOW):
        for part in range(accumulation - 1):  # is discarded, too
            engine.backward(engine(batch(100 + part, rank)))
            engine.step()
        skip(engine, engine.backward, zero_grads[by], how, rank)
        before = whole(model)
        for part in range(accumulation):
            loss = engine(batch(accumulation * step + part, rank))
            if part == 0:
                zero_grads[by]()  # before backward, as many do: there is nothing to discard
            uses = sorted(engine.optimizer.fused.buckets.uses.count.values())
            engine.backward(loss)
            engine.step()
        got = {
            "last": last,
            "before": before,
            "after": whole(model),
            "uses": uses,
            "gathered": len(list(_gathered(model))),
            "waits": sum(getattr(m, "ds_grads_remaining", 0) for m in model.modules()),
            "steps": engine.global_steps,
        }
        told.append(got)
        last = got["after"]
    return told


def _gathered(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters of ZeRO-3 that are gathered and should not be."""
    for p in model.parameters():
        status = getattr(p, "ds_status", None)
        if status is not None and status.name != "NOT_AVAILABLE" and not p.ds_persist:
            yield p
