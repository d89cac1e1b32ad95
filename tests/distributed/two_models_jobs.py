"""Jobs that train two models, a generator and a discriminator, or one model of many."""

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

import ds_ext
from tests.common import engines
from tests.common.ranks import whole

STEPS = 3
LR = 0.1


def make() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))
    return generator, nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


class Checkpointed(nn.Module):
    """A model all of which is run again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            self.inner, x if x.requires_grad else x.clone().requires_grad_(), use_reentrant=True
        )


def noise(step: int, rank: int, width: int) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + rank))


def discriminating(g: nn.Module, d: nn.Module, step: int, rank: int, detach: bool) -> torch.Tensor:
    fake = g(noise(step, rank, 3))
    both = torch.cat([noise(step, rank, 5), fake.detach() if detach else fake])
    score = d(both)
    return softplus(-score[:4]).mean() + softplus(score[4:]).mean()


def generating(g: nn.Module, d: nn.Module, step: int, rank: int) -> torch.Tensor:
    return softplus(-d(g(noise(step + 50, rank, 3)))).mean()


def reference(world: int, detach: bool, max_norm: float = torch.inf) -> list[torch.Tensor]:
    """By SGD on the mean over ranks -> the parameters of both models."""
    g, d = make()
    optimizers = [torch.optim.SGD(m.parameters(), LR) for m in (g, d)]
    for step in range(STEPS):
        optimizers[1].zero_grad()
        sum(discriminating(g, d, step, r, detach) for r in range(world)).div(world).backward()
        torch.nn.utils.clip_grad_norm_(d.parameters(), max_norm)
        optimizers[1].step()
        optimizers[0].zero_grad()
        sum(generating(g, d, step, r) for r in range(world)).div(world).backward()
        torch.nn.utils.clip_grad_norm_(g.parameters(), max_norm)
        optimizers[0].step()
    return [p.detach() for m in (g, d) for p in m.parameters()]


def start(model: nn.Module, stage: int, policy: str, max_norm: float) -> Any:
    optimizer = ds_ext.LOMO(model.parameters(), lr=LR)
    return engines.start(model, optimizer, stage, policy, gradient_clipping=max_norm)


def train(stage: int, policy: str, max_norm: float = 0.0) -> dict[str, Any]:
    """Two engines, scored in inference mode -> the parameters of both, before and after."""
    g, d = (start(model, stage, policy, max_norm) for model in make())
    before = weights(g, d)
    rank = dist.get_rank()
    for step in range(STEPS):
        d.zero_grad()
        d.backward(discriminating(g, d, step, rank, detach=True))
        d.step()
        g.zero_grad()
        loss = generating(g, d, step, rank)
        with torch.inference_mode():  # as a reward is computed
            d(g(noise(step, rank, 3)))
        g.backward(loss)
        g.step()
    return {"before": before, "after": weights(g, d)}


def weights(*made: Any) -> list[torch.Tensor]:
    return [p for engine in made for p in whole(engine.module).values()]


def chain() -> list[nn.Module]:
    """Models of different sizes, each for the outputs of the one before."""
    torch.manual_seed(0)
    return [nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + i % 3))) for i in range(6)]


def through(models: list[nn.Module], step: int, rank: int) -> torch.Tensor:
    h = noise(step, rank, 4)
    for model in models:
        h = torch.tanh(model(h))
    return h.square().mean()


def first_of_many() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Six engines, of which the first is clipped and stepped -> its parameters before and after."""
    rank, made, apart = dist.get_rank(), [], []
    for i, model in enumerate(chain()):
        apart.append([object() for _ in range(1000 * rank * i)])  # other addresses on each rank
        made.append(start(model, 0, "", 0.0 if i else 0.01))
    before = weights(made[0])
    for step in range(STEPS):
        for engine in made:
            engine.zero_grad()
        made[0].backward(through(made, step, rank))
        made[0].step()
    return before, weights(made[0])


def first_of_many_alone(world: int) -> list[torch.Tensor]:
    """The same by SGD on the mean over ranks."""
    models = chain()
    optimizer = torch.optim.SGD(models[0].parameters(), LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(through(models, step, rank) for rank in range(world)).div(world).backward()
        torch.nn.utils.clip_grad_norm_(models[0].parameters(), 0.01)
        optimizer.step()
    return [p.detach() for p in models[0].parameters()]


def beside_a_failed_pass() -> int:
    """One engine fails in backward, another one clips exactly -> how often the first ended."""
    g, d = (start(model, 0, "", 0.1) for model in make())

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError

    loss = g(noise(0, dist.get_rank(), 3)).square().mean()
    list(g.module.parameters())[-1].register_hook(fail)
    with contextlib.suppress(ArithmeticError):
        g.backward(loss)
    assert g.optimizer.fused.uses.used_at
    with mock.patch.object(g.optimizer.fused, "finish") as ended:
        d.backward(d(noise(0, dist.get_rank(), 5)).square().mean())
        d.step()
    return ended.call_count
