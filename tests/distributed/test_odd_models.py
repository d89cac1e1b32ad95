"""Engines of odd models against one process: sparse embeddings, channels_last, layers unfrozen
later, resized parameters, several dtypes, and weights that backward reads again."""

import functools
from typing import Any

import pytest
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import ds_ext
from tests import worlds
from tests.common import engines, models
from tests.common.choose import params
from tests.common.ranks import REFUSALS, whole
from tests.common.states import same
from tests.common.updates import check_each
from tests.unit import test_odd_models as mixed_models
from tests.unit.test_odd_models import F32, F64

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


ROWS, MORE = 10, 16


def words(rows: int = ROWS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(rows, 6), nn.Linear(6, 3))


def rows_loss(model: Any, number: int, rank: int) -> Tensor:
    return model(engines.rows(number, rank, 5, 6).to(torch.float64))


def mixed(
    name: str, stage: int, dtypes: list[torch.dtype], policy: str, more: dict[str, Any]
) -> dict[str, Any]:
    model = mixed_models.make(dtypes)
    optimizer = mixed_models.optimizer_of(name, model.parameters())
    return engines.trained(engines.start(model, optimizer, stage, policy, **more), rows_loss, STEPS)


def penalized_loss(model: Any, number: int, rank: int) -> Tensor:
    x = engines.rows(number, rank, 3, 5).requires_grad_()
    loss = (model(x) - 1).square().sum()
    (by_input,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 0.1 * by_input.square().sum()


class Reading(nn.Module):
    """``weight`` is also read without a gradient, by a node that runs after its step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(5, 5)
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(torch.tanh(self.first(x)), self.weight.detach())
        return F.linear(torch.tanh(h), self.weight).square().sum()


def reading_loss(model: Any, number: int, rank: int) -> Tensor:
    return model(engines.rows(number, rank, 3, 5))


READ_AGAIN: dict[str, tuple[Any, engines.Loss, str]] = {  # with the policy
    "by the model": (Reading, reading_loss, ""),
    "by a penalty": (functools.partial(models.layers, 5, 8, 3), penalized_loss, "sharded"),
}


def read_again(stage: int | None, how: str, accumulation: int) -> dict[str, Any]:
    """One step whose backward pass reads a weight again -> weights before and after, the error."""
    make, loss, policy = READ_AGAIN[how]
    model, said = make(), ""
    optimizer, more = ds_ext.LOMO(model.parameters(), lr=0.1), {"overlap_comm": False}
    more = {"zero": more | {"reduce_bucket_size": 25}, "gradient_accumulation_steps": accumulation}
    engine = engines.start(model, optimizer, stage, policy, **more)
    before = whole(model)
    try:
        engines.trained(engine, loss, 1, accumulation)
    except RuntimeError as error:
        said = str(error)
    has_ended = policy or not said  # else weights of stage 3 may be in use
    return {"message": said, "before": before, "after": whole(model) if has_ended else {}}


CASES = [(stage, 0.0, "fused") for stage in range(4)]
CASES += [(1, 0.05, "fused"), (3, 0.05, "fused"), (2, 0.05, "sharded"), (3, 0.05, "sharded")]


@pytest.mark.parametrize("stage, max_norm, policy", params(CASES, [CASES[i] for i in (0, 3, 4, 6)]))
def test_odd_models_are_trained_as_in_one_process(stage, max_norm, policy):
    expected = alone(max_norm)
    for got in worlds.run(2, train, stage, max_norm, policy):
        check_each(got["after"], expected.after, expected.before)
        assert not any(torch.equal(p, expected.before[n]) for n, p in expected.after.items())


@worlds.on(2)
def test_a_leaf_module_without_inputs_that_need_gradients_is_refused():
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


RESIZED = [(stage, policy) for stage in (0, 1, 2, 3) for policy in ("fused", "sharded")]


@pytest.mark.parametrize("stage, policy", params(RESIZED, [(1, "fused"), (3, "fused")]))
@worlds.on(2)
def test_an_engine_refuses_resized_parameters_in_backward(stage, policy):
    """Resizes as transformers' resize_token_embeddings does, after a step of an engine."""
    model = words()
    engine = engines.start(model, ds_ext.AdaLomo(model.parameters()), stage, policy)

    def step() -> None:
        engine.backward(engine(torch.arange(ROWS)).square().mean())
        engine.step()

    step()
    before, weight = whole(model), model[0].weight
    rows = torch.ones(ROWS, 6) if stage == 3 else weight.data
    weight.data = torch.cat([rows, rows[: MORE - ROWS]])
    with pytest.raises(REFUSALS, match=r"0.weight has the shape \[16, 6\] now"):
        step()
    after = whole(model) if stage == 3 else dict(model.named_parameters())
    moved = [n for n, p in after.items() if not p.equal(before[n])]
    assert moved == ([] if stage == 3 else ["0.weight"])


@pytest.mark.parametrize("fused", [True, False])
@worlds.on(2)
def test_states_of_dtensors_are_checked(fused):
    model = fully_shard(words())
    optimizer = ds_ext.AdaLomo(model.parameters())
    if fused:
        ds_ext.fuse_into_backward(model, optimizer)

    def step() -> None:
        model(torch.arange(ROWS)).square().mean().backward()
        optimizer.step()

    step()
    saved = optimizer.state_dict()
    other = ds_ext.AdaLomo(fully_shard(words(MORE)).parameters())
    with pytest.raises(REFUSALS, match="not a state of AdaLomo for these parameters"):
        optimizer.load_state_dict(other.state_dict())
    optimizer.load_state_dict(saved)
    optimizer.state[model[0].weight]["v"]["row"] = torch.zeros(1, 3)
    with pytest.raises(REFUSALS, match=r"does not fit it: v.row has the shape \[1, 3\]"):
        step()


ONLY_F64 = [F64, F64]
IN_FP32, CLIP = {"communication_data_type": "fp32"}, {"gradient_clipping": 0.01}
MIXED = [
    *(("came", stage, ONLY_F64, "fused", {}) for stage in range(4)),
    *(("adalomo", stage, [F32, F64, F32], "fused", CLIP) for stage in range(4)),
    *(("galoreadamw", stage, [F64, F32], "sharded", CLIP) for stage in (1, 3)),
    *(("came", 2, ONLY_F64, policy, IN_FP32) for policy in ("fused", "sharded")),
]


@pytest.mark.parametrize("name, stage, dtypes, policy, more", params(MIXED, MIXED[3::3]), ids=str)
def test_engines_train_fp64_and_mixed_models(name, stage, dtypes, policy, more):
    model, norm = mixed_models.make(dtypes), more.get("gradient_clipping", 0.0)
    optimizer = mixed_models.optimizer_of(name, model.parameters())
    expected = engines.alone(model, optimizer, rows_loss, STEPS, max_norm=norm)
    bound = 1e-11 if dtypes == ONLY_F64 and more != IN_FP32 else 1e-5
    for got in worlds.run(2, mixed, name, stage, dtypes, policy, more):
        assert got["norms"] == pytest.approx(expected.norms, rel=bound)
        check_each(got["after"], expected.after, got["before"], close=bound)
        assert all(got["after"][n].dtype == p.dtype for n, p in expected.after.items())


IN_PLACE, PENALTY = "modified by an inplace operation", "create_graph=True"
# By the model: at stage 3 it was gathered before, and its shards are stepped. A penalty is refused
# where DeepSpeed's hook of a model's output divides by the number of micro-batches each time.
AGAIN = [(2, 3, "by the model", 1, "")]
AGAIN += [
    (n, stage, "by the model", 1, IN_PLACE)
    for n, stage in ((1, None), (1, 0), (1, 3), (2, 0), (2, 2))
]
AGAIN += [(2, stage, "by a penalty", 1, "") for stage in (0, 1)]
AGAIN += [(2, s, "by a penalty", n, PENALTY) for s, n in ((0, 2), (2, 2), (3, 1))]


@pytest.mark.parametrize("world, stage, how, accumulation, words", AGAIN)
def test_a_weight_read_again_is_the_old_one_or_an_error(world, stage, how, accumulation, words):
    make, loss, _ = READ_AGAIN[how]
    model = make()
    expected = engines.alone(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, 1)
    for got in worlds.run(world, read_again, stage, how, accumulation):
        assert words in got["message"] and bool(words) == bool(got["message"])
        if words:  # before a step, where weights are not in use
            assert all(x.equal(got["before"][n]) for n, x in got["after"].items())
        else:
            check_each(got["after"], expected.after, got["before"])
