"""What DeepSpeed offers beside ZeRO is exact: hpZ's second copies of weights, compiled models."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.utils import groups
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import ds_ext
from tests import worlds
from tests.common import by_role, engines, models
from tests.common.by_role import MATRICES
from tests.common.choose import params
from tests.common.hypers import CLOSE
from tests.common.plain import mean_step
from tests.common.ranks import whole
from tests.common.updates import error
from tests.distributed import training_jobs
from tests.distributed.training_jobs import Training


def partly_frozen() -> models.Zoo:
    model = models.make(dropout=0.3)
    model.up.bias.requires_grad_(False)
    return model


def second_copies(run: Training) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = partly_frozen()
    engine = training_jobs.start(run, model)
    for step in range(training_jobs.STEPS):
        loss = training_jobs.loss_of(engine, run, step, 0, rank, world)
        held = [p for p in model.parameters() if p.ds_secondary_tensor is not None]
        parts = {p.ds_secondary_tensor.numel() // p.ds_tensor.numel() for p in held}
        assert len(held) > 10 and parts == {world // 2}  # made in forward, of these runs each
        engine.backward(loss)
        engine.step()
        # Kept of what is not trained, forgotten of what was.
        assert model.frozen.weight.ds_secondary_tensor is not None
        assert model.up.weight.ds_secondary_tensor is None
    return {"after": whole(model), "told": by_role.told(engine.optimizer, model)}


class Net(nn.Module):
    """Of several modules, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.same, self.down = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 4)
        self.norm = nn.LayerNorm(9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        h = self.norm(h + torch.tanh(self.same(torch.tanh(self.same(h)))))
        return self.down(h).square().mean()


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def loss_of(model: Any, number: int, rank: int) -> torch.Tensor:
    return model(engines.rows(number, rank, 4, 6))


STEPS = 4
# stage, what is compiled, torch's backend, clipping
COMPILED = [(None, "model", "aot_eager", 0.05), (0, "model", "aot_eager", 0.0)]
COMPILED += [(1, "engine", "eager", 0.05), (2, "model", "eager", 0.0)]
COMPILED += [(3, "engine", "aot_eager", 0.05)]


def compiled(stage: int | None, how: str, backend: str, max_norm: float) -> dict[str, Any]:
    counter = CompileCounterWithBackend(backend)
    torch._dynamo.reset()
    model = net()
    optimizer = ds_ext.AdaLomo(model.parameters(), lr=0.01)
    given: Any = torch.compile(model, backend=counter) if how == "model" else model
    engine = engines.start(given, optimizer, stage, gradient_clipping=max_norm)
    if how == "engine":
        engine.compile(backend=counter)
    engines.trained(engine, loss_of, STEPS)
    return {"after": whole(model), "graphs": counter.frame_count}


# Ranks of each rule.
HPZ = {"adalomo": 4, "came": 2} | dict.fromkeys(MATRICES, 2)


@pytest.mark.supports("ZeRO++ hpZ", stage=3, optimizer="rule")
@pytest.mark.parametrize("rule", params(HPZ, []))
def test_second_copies_of_the_weights_never_go_stale(rule):
    world = HPZ[rule]
    run = Training(rule, 3, extra={"zero": {"zero_hpz_partition_size": 2}})
    found = worlds.once(world, second_copies, run)
    told, model = found[0]["told"], partly_frozen()
    before, expected, _ = training_jobs.alone(run, world, told, model)
    for rank in found:
        assert error(rank["after"], expected, before) <= CLOSE.get(rule, 1e-5)


@pytest.mark.parametrize("frozen", [0, 2])
@worlds.on(4)
def test_second_copies_of_persistent_parameters_never_go_stale(frozen):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model[frozen].bias.requires_grad_(False)
    reference = copy.deepcopy(model)
    optimizer = ds_ext.LOMO([p for p in model.parameters() if p.requires_grad], lr=0.5)
    engine = engines.start(model, optimizer, 3, zero={"zero_hpz_partition_size": 2})
    sgd, losses = torch.optim.SGD(reference.parameters(), lr=0.5), []
    x = engines.rows(0, 0, 4, 8)
    for _ in range(3):
        loss, expected = (m(x).square().mean() for m in (engine, reference))
        engine.backward(loss)
        engine.step()
        mean_step(sgd, [expected])
        losses.append(expected.item())
        assert loss.item() == pytest.approx(losses[-1], rel=1e-5)
    assert losses[2] < losses[0] - 0.01
    host = groups._get_zero_param_intra_parallel_group()
    waiting = [g._get_backend(x.device).options._timeout for g in (dist.group.WORLD, host)]
    assert waiting[0] == waiting[1]


@pytest.mark.supports("`torch.compile`", stage=lambda case: case[0], optimizer="AdaLomo")
@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_a_compiled_model_is_trained_exactly(case):
    model, max_norm = net(), case[3]
    optimizer = transformers.Adafactor(model.parameters(), lr=0.01, relative_step=False)
    alone = engines.alone(model, optimizer, loss_of, STEPS, max_norm=max_norm)
    assert min(alone.norms) > 1.5 * max_norm  # or it would show nothing
    for got in worlds.once(2, compiled, *case):
        assert got["graphs"] > 0
        assert error(got["after"], alone.after, alone.before) <= 1e-5
