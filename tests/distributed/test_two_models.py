"""Two models trained in turn, whose losses go through both: each is stepped by its own alone."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

import ds_ext
from tests import worlds
from tests.common import engines, models
from tests.common.choose import params
from tests.common.engines import rows
from tests.common.plain import mean_step
from tests.common.ranks import whole

STEPS = 3
LR = 0.1


def make() -> tuple[nn.Module, nn.Module]:
    return models.layers(3, 8, 5), models.layers(5, 8, 1, seed=1)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            self.inner, x if x.requires_grad else x.clone().requires_grad_(), use_reentrant=True
        )


def discriminating(g: nn.Module, d: nn.Module, step: int, rank: int, detach: bool) -> torch.Tensor:
    fake = g(rows(step, rank, 4, 3))
    both = torch.cat([rows(step, rank, 4, 5), fake.detach() if detach else fake])
    score = d(both)
    return softplus(-score[:4]).mean() + softplus(score[4:]).mean()


def generating(g: nn.Module, d: nn.Module, step: int, rank: int) -> torch.Tensor:
    return softplus(-d(g(rows(step + 50, rank, 4, 3)))).mean()


def reference(world: int, detach: bool, max_norm: float = 0.0) -> list[torch.Tensor]:
    """By SGD on the mean over ranks -> the parameters of both models."""
    g, d = make()
    optimizers = [torch.optim.SGD(m.parameters(), LR) for m in (g, d)]
    for step in range(STEPS):
        of_d = [discriminating(g, d, step, rank, detach) for rank in range(world)]
        mean_step(optimizers[1], of_d, max_norm)
        mean_step(optimizers[0], [generating(g, d, step, rank) for rank in range(world)], max_norm)
    return [p.detach() for m in (g, d) for p in m.parameters()]


def start(model: nn.Module, stage: int | None, policy: str, max_norm: float) -> Any:
    optimizer = ds_ext.LOMO(model.parameters(), lr=LR)
    return engines.start(model, optimizer, stage, policy, gradient_clipping=max_norm)


def train(
    stage: int | None, policy: str, max_norm: float, detach: bool = True, checkpoints: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two engines, one scored in inference mode -> the parameters of both, before and after."""
    first, second = make()
    if checkpoints:  # what a segment's own backward pass reaches ends with the segment
        second = Checkpointed(second)
    g, d = (start(model, stage, policy, max_norm) for model in (first, second))
    before = weights(g, d)
    rank = dist.get_rank()
    for step in range(STEPS):
        zero_grad(d)
        backward(d, discriminating(g, d, step, rank, detach))
        if stage is None and not checkpoints:
            assert bool(d.fused.state.kept) == (policy == "sharded" or not detach)
        d.step()
        zero_grad(g)
        loss = generating(g, d, step, rank)
        with torch.inference_mode():  # as a reward is computed
            d(g(rows(step, rank, 4, 3)))
        backward(g, loss)
        g.step()
    return before, weights(g, d)


def zero_grad(engine: Any) -> None:
    getattr(engine, "zero_grad", engine.optimizer.zero_grad)()


def backward(engine: Any, loss: torch.Tensor) -> None:
    """By the engine, or of the loss itself where there is none."""
    loss.backward() if isinstance(engine, engines.Fused) else engine.backward(loss)


def weights(*made: Any) -> list[torch.Tensor]:
    return [p for engine in made for p in whole(engine.module).values()]


def chain() -> list[nn.Module]:
    """Models of different sizes, each of which takes the outputs of the one before."""
    torch.manual_seed(0)
    return [nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + i % 3))) for i in range(6)]


def through(made: list[nn.Module], step: int, rank: int) -> torch.Tensor:
    h = rows(step, rank, 4, 4)
    for model in made:
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


def parts(pair: tuple[nn.Module, nn.Module]) -> list[torch.Tensor]:
    """What this rank holds of the weights. Padding may be NaN."""
    params = [p for model in pair for p in model.parameters()]
    return [getattr(p, "ds_tensor", p).detach().nan_to_num() for p in params]


def assert_equal_updates(got, wanted, start) -> None:
    for p, q, before in zip(got, wanted, start, strict=True):
        assert (q - before).norm() > 0
        assert (p - q).norm() <= 1e-5 * (q - before).norm() + 2**-22 * q.norm()


# Any two of stage, policy and clipping together; without an engine, in one process.
GANS = [(stage, "fused", 0.0 if stage in (1, 2) else 0.1, True, False) for stage in range(4)]
GANS += [(stage, "sharded", 0.1 if stage in (1, 2) else 0.0, True, False) for stage in range(4)]
GANS += [(None, "fused", 0.0, detach, own) for detach in (True, False) for own in (True, False)]
GANS += [(None, "sharded", 0.0, detach, own) for detach in (True, False) for own in (True, False)]
QUICK = [GANS[i] for i in (0, 3, 5, 7)] + GANS[8:]


@pytest.mark.parametrize("stage, policy, max_norm, detach, checkpoints", params(GANS, QUICK))
def test_a_gan(stage, policy, max_norm, detach, checkpoints):
    world = 1 if stage is None else 2
    wanted = reference(world, detach, max_norm)
    for before, after in worlds.run(world, train, stage, policy, max_norm, detach, checkpoints):
        assert_equal_updates(after, wanted, before)


def test_ranks_end_the_backward_passes_of_many_engines_in_the_same_order():
    made = chain()
    sgd = torch.optim.SGD(made[0].parameters(), LR)
    alone = engines.alone(made[0], sgd, lambda _, *of: through(made, *of), STEPS, 2, 0.01)
    for before, after in worlds.run(2, first_of_many):
        assert_equal_updates(after, alone.after.values(), before)


@worlds.on(2)
def test_an_engine_whose_backward_pass_has_failed_takes_no_part_in_another_engines():
    g, d = (start(model, 0, "", 0.1) for model in make())

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError

    loss = g(rows(0, dist.get_rank(), 4, 3)).square().mean()
    list(g.module.parameters())[-1].register_hook(fail)
    with contextlib.suppress(ArithmeticError):
        g.backward(loss)
    assert g.optimizer.fused.uses.used_at
    with mock.patch.object(g.optimizer.fused, "finish") as ended:
        d.backward(d(rows(0, dist.get_rank(), 4, 5)).square().mean())
        d.step()
    assert not ended.called


@pytest.mark.parametrize("other_kind", ["fp32", "no engine", "fp16"])
@pytest.mark.parametrize(
    "stage, is_last", params([(1, True), (2, False), (3, False)], [(1, True), (3, False)])
)
@worlds.on(2)
def test_one_loss_of_two_loss_scales_is_refused_before_a_weight_moves(stage, is_last, other_kind):
    """Otherwise the gradients of an fp32 model would be 256 times too large."""
    pair = make()
    if is_last:  # one of the two is hidden from the graph of the other
        pair = pair[0], Checkpointed(pair[1])
    half, other = pair[is_last], pair[not is_last]
    fp16 = {"enabled": True, "loss_scale": 256.0}
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True):
        optimizer = ds_ext.LOMO(half.half().parameters(), lr=LR)
        scaled = engines.start(half, optimizer, stage, "", fp16=fp16)
        if other_kind == "fp16":
            optimizer = ds_ext.LOMO(other.half().parameters(), lr=LR)
            called = scaled, engines.start(other, optimizer, stage, "", fp16=fp16)
    optimizer = ds_ext.LOMO(other.parameters(), lr=LR)
    if other_kind == "fp32":
        engines.start(other, optimizer, stage)
    elif other_kind == "no engine":
        ds_ext.fuse_into_backward(other, optimizer)
    before = parts(pair)
    g, d = pair
    if other_kind == "fp16":  # the hooks of each engine see the backward pass
        g, d = reversed(called) if is_last else called
    of_other = torch.half if other_kind == "fp16" else torch.float
    h = g(rows(0, dist.get_rank(), 4, 3).to(of_other if is_last else torch.half))
    loss = d(h.to(torch.half if is_last else of_other)).float().square().mean()
    is_seen = other_kind == "fp16" and not is_last  # the other engine's hooks run, too
    words = "one loss is of two engines with" if is_seen else "loss scales are"
    with pytest.raises(RuntimeError, match=f"(?s){words}.*use bf16 or fp32 for both models"):
        scaled.backward(loss)
    assert all(map(torch.equal, before, parts(pair)))
