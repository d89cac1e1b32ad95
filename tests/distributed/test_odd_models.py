"""Engines: sparse embeddings, channels_last, layers unfrozen later, resized parameters."""

from typing import Any

import pytest
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import ds_ext
from tests import worlds
from tests.common import engines
from tests.common.choose import params
from tests.common.ranks import REFUSALS, whole
from tests.common.states import same
from tests.common.updates import check_each

STEPS = 4


class Odd(nn.Module):
    """Sparse embeddings and convolutions, a part of which is frozen at the beginning."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.words = nn.Embedding(9, 12, sparse=sparse)
        self.conv = nn.Conv2d(3, 5, 2)
        self.late = nn.Linear(5, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        images = self.words(x).view(-1, 3, 2, 2)
        return self.late(torch.tanh(self.conv(images)).flatten(1)).square().mean()


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return model(torch.randint(0, 9, (6,), generator=generator))


def unfreeze(model: Odd, optimizer: Any, step: int) -> None:
    if step == 2:
        model.late.requires_grad_(True)


def train(stage: int, max_norm: float, policy: str) -> dict[str, Any]:
    """An engine's steps; gradients were left by an earlier pass, and layers are unfrozen later."""
    model = Odd(sparse=True)
    loss_of(model, 99, torch.distributed.get_rank()).backward()
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.2)
    engine = engines.start(model, optimizer, stage, policy, gradient_clipping=max_norm)
    model.to(memory_format=torch.channels_last)
    return engines.trained(engine, loss_of, STEPS, edit=unfreeze)


def alone(max_norm: float) -> engines.Alone:
    model = Odd(sparse=False)
    sgd = torch.optim.SGD(model.parameters(), 0.2)
    return engines.alone(model, sgd, loss_of, STEPS, max_norm=max_norm, edit=unfreeze)


class First(nn.Module):
    """Layers that are taken together, of which one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.used(x))


def leaf_inputs() -> None:
    """A leaf module's input without gradients is refused; a later step trains."""
    model = nn.Sequential(First(), nn.Linear(8, 1))
    set_z3_leaf_modules(model, [First])
    engine = engines.start(model, ds_ext.LOMO(model.parameters(), lr=0.2), 3)
    before = whole(model)

    def step(needs_gradient: bool) -> None:
        engine.backward(engine(torch.randn(6, 6, requires_grad=needs_gradient)).square().mean())
        engine.step()

    with pytest.raises(RuntimeError, match="First is a leaf module of ZeRO-3.*unset_z3_leaf_mod"):
        step(False)
    with torch.no_grad():
        engine(torch.randn(6, 6))
    assert same(before, whole(model))
    step(True)
    assert not torch.equal(whole(model)["0.used.weight"], before["0.used.weight"])


ROWS, MORE = 10, 16


class Words(nn.Module):
    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(rows, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x)).square().mean()


def in_engine(stage: int, policy: str) -> None:
    """Resizes as transformers' resize_token_embeddings does, after a step of an engine."""
    model = Words()
    engine = engines.start(model, ds_ext.AdaLomo(model.parameters()), stage, policy)

    def step() -> None:
        engine.backward(engine(torch.arange(ROWS)))
        engine.step()

    step()
    before, weight = whole(model), model.embed.weight
    rows = torch.ones(ROWS, 6) if stage == 3 else weight.data
    weight.data = torch.cat([rows, rows[: MORE - ROWS]])
    with pytest.raises(REFUSALS, match=r"embed.weight has the shape \[16, 6\] now"):
        step()
    after = whole(model) if stage == 3 else dict(model.named_parameters())
    moved = [n for n, p in after.items() if not p.equal(before[n])]
    assert moved == ([] if stage == 3 else ["embed.weight"])


def in_fsdp2(fused: bool) -> None:
    """The same of a model of DTensors; a state of another shape is loaded before that."""
    model = fully_shard(Words())
    optimizer = ds_ext.AdaLomo(model.parameters())
    if fused:
        ds_ext.fuse_into_backward(model, optimizer)

    def step() -> None:
        model(torch.arange(ROWS)).backward()
        optimizer.step()

    step()
    saved = optimizer.state_dict()
    other = ds_ext.AdaLomo(fully_shard(Words(MORE)).parameters())
    with pytest.raises(REFUSALS, match="not a state of AdaLomo for these parameters"):
        optimizer.load_state_dict(other.state_dict())
    optimizer.load_state_dict(saved)
    optimizer.state[model.embed.weight]["v"]["row"] = torch.zeros(1, 3)
    with pytest.raises(REFUSALS, match=r"does not fit it: v.row has the shape \[1, 3\]"):
        step()


CASES = [(stage, 0.0, "fused") for stage in range(4)]
CASES += [(1, 0.05, "fused"), (3, 0.05, "fused"), (2, 0.05, "sharded"), (3, 0.05, "sharded")]


@pytest.mark.parametrize("stage, max_norm, policy", CASES)
def test_odd_models_are_trained_as_in_one_process(stage, max_norm, policy):
    expected = alone(max_norm)
    for got in worlds.run(2, train, stage, max_norm, policy):
        check_each(got["after"], expected.after, expected.before)
        assert not any(torch.equal(p, expected.before[n]) for n, p in expected.after.items())


def test_a_leaf_module_without_inputs_that_need_gradients_is_refused():
    worlds.run(2, leaf_inputs)


RESIZED = [(stage, policy) for stage in (0, 1, 2, 3) for policy in ("fused", "sharded")]


@pytest.mark.parametrize("stage, policy", params(RESIZED, [(1, "fused"), (3, "fused")]))
def test_an_engine_refuses_resized_parameters_in_backward(stage, policy):
    worlds.run(2, in_engine, stage, policy)


@pytest.mark.parametrize("fused", [True, False])
def test_states_of_dtensors_are_checked(fused):
    worlds.run(2, in_fsdp2, fused)
