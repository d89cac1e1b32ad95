"""DeepSpeed's safe_get_* and safe_set_* under our optimizers: right at every stage, or refused."""

import io
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed import utils
from torch import nn

from ds_ext.optimizer import OPTIMIZERS
from tests import worlds
from tests.common import engines
from tests.common.choose import params
from tests.common.plain import mean_step
from tests.common.ranks import REFUSALS, whole
from tests.common.states import same

STAGES = (0, 1, 2, 3)


class Pair(nn.Module):
    """A matrix that no number of ranks divides, a vector, a frozen and an unused weight."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.matrix = nn.Parameter(torch.randn(7, 5).to(dtype))
        self.bias = nn.Parameter(torch.randn(7).to(dtype))
        self.frozen = nn.Parameter(torch.randn(5, 3).to(dtype), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            (nn.functional.linear(x.to(self.matrix.dtype), self.matrix, self.bias)).square().sum()
        )


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(engines.rows(step, rank, 4, 5))


def start(
    stage: int, kind: str, policy: str = "fused", dtype: torch.dtype = torch.float32, **hypers: Any
) -> deepspeed.DeepSpeedEngine:
    model = Pair(dtype)
    optimizer = OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad], **hypers)
    bf16 = {"enabled": dtype == torch.bfloat16}
    return engines.start(model, optimizer, stage, policy, bf16=bf16)


def step(engine: deepspeed.DeepSpeedEngine, number: int) -> None:
    engine.backward(loss_of(engine, number, dist.get_rank()))
    engine.step()


def getters(param: nn.Parameter) -> list[Any]:
    return [
        utils.safe_get_full_fp32_param(param),
        utils.safe_get_full_optimizer_state(param, "exp_avg"),
        utils.safe_get_full_grad(param),
    ]


def read(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: utils.safe_get_full_fp32_param(p) for n, p in model.named_parameters()}
    assert found.pop("frozen") is None
    return found


def weights(stage: int, mode: str) -> None:
    """Weights are read whole, and as they are after they were set, also by a step."""
    dtype = torch.float32 if mode == "fp32" else torch.bfloat16
    master = {} if mode == "fp32" else {"weight_update": mode}
    engine = start(stage, "lomo", dtype=dtype, lr=1e-3, **master)
    step(engine, 0)
    model = engine.module
    got, held = read(model), whole(model)
    assert getters(model.frozen) == [None] * 3
    for name, value in got.items():
        assert value.dtype == torch.float32 and value.shape == held[name].shape
        assert torch.equal(value.to(dtype), held[name]), name
    new = {"matrix": got["matrix"] + 1 / 3, "bias": got["bias"] * 2}
    for name, value in new.items():
        utils.safe_set_full_fp32_param(model.get_parameter(name), value)
    if stage == 3:
        with pytest.raises(AttributeError, match="does not support get_local_fp32_param"):
            utils.safe_get_local_fp32_param(model.bias)
    after, used = read(model), whole(model)
    for name, value in new.items():
        off = (after[name] - value).abs()  # in fp32, also where it is bf16
        assert (off <= (2**-8 / 254 * value.abs() if mode == "master24" else 0)).all(), name
        assert torch.equal(used[name], value.to(dtype)), name
    assert torch.equal(after["unused"], got["unused"])
    with pytest.raises(REFUSALS, match="matrix has 35 elements"):
        utils.safe_set_full_fp32_param(model.matrix, new["matrix"][1:])


def gradients(stage: int) -> None:
    """Gradients that are kept are read whole, and LOMO steps by what they are set to."""
    engine = start(stage, "lomo", "sharded", lr=0.1)
    model, rank, alone = engine.module, dist.get_rank(), Pair()
    with pytest.raises(REFUSALS, match=r"between engine.backward\(loss\) and engine.step\(\)"):
        utils.safe_get_full_grad(model.matrix)
    before = whole(model)
    engine.backward(loss_of(engine, 0, rank))
    got = {n: utils.safe_get_full_grad(p) for n, p in model.named_parameters()}
    assert got["frozen"] is None and got["unused"] is None
    utils.safe_set_full_grad(model.matrix, 2 * got["matrix"])
    utils.safe_update_full_grad_vectorized([model.bias], lambda g, p: 2 * g)
    engine.step()
    after = whole(model)
    (sum(loss_of(alone, 0, rank) for rank in range(2)) / 2).backward()
    for name in ("matrix", "bias"):
        g = alone.get_parameter(name).grad
        assert (got[name] - g).norm() <= 1e-6 * g.norm(), name
        moved = before[name] - after[name]
        assert (moved - 0.1 * 2 * g).norm() <= 1e-5 * moved.norm(), name
    engine.backward(loss_of(engine, 1, rank))
    utils.safe_set_full_grad(model.matrix, got["matrix"] * torch.nan)
    engine.step()
    assert same(after, whole(model))
    fused = start(stage, "lomo", "fused", lr=0.1)
    fused.backward(loss_of(fused, 0, rank))
    with pytest.raises(REFUSALS, match='matrix.*"gradient_policy": "sharded"'):
        utils.safe_get_full_grad(fused.module.matrix)


STATES = {  # by optimizer: names of what it keeps of a matrix and of a vector
    "lamb": (("exp_avg", "exp_avg_sq"), ("exp_avg", "v")),
    "came": (("exp_avg", "exp_avg_sq_row", "exp_avg_sq_col", "r.row"), ("m", "exp_avg_sq")),
    "galoreadamw": (("exp_avg", "exp_avg_sq", "q"), ("exp_avg", "exp_avg_sq")),
}


def states(stage: int, kind: str) -> None:
    """States are read whole by all of their names, and as they are after they were set."""
    more = {"rank": 2} if kind == "galoreadamw" else {}
    engine = start(stage, kind, lr=1e-3, **more)
    model, get, alone = engine.module, utils.safe_get_full_optimizer_state, states_alone(kind)
    with pytest.raises(REFUSALS, match="no state yet"):
        get(model.matrix, STATES[kind][0][0])
    for number in range(2):
        step(engine, number)
    for (name, key), expected in alone.items():
        param = model.get_parameter(name)
        value = get(param, key)
        assert value.shape == expected.shape, key
        assert (value - expected).norm() <= 1e-5 * expected.norm(), key
        utils.safe_set_full_optimizer_state(param, value + 1, key)
        assert torch.allclose(get(param, key) - 1, value, atol=1e-6), key
    assert get(model.frozen, "exp_avg") is None
    with pytest.raises(REFUSALS, match="keeps no 'exp_avgs' of matrix; it keeps"):
        get(model.matrix, "exp_avgs")


def states_alone(kind: str) -> dict[tuple[str, str], torch.Tensor]:
    model = Pair()
    more = {"rank": 2} if kind == "galoreadamw" else {}
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[kind](params, lr=1e-3, **more)
    for number in range(2):
        mean_step(optimizer, [loss_of(model, number, rank) for rank in range(2)])
    paths = {"exp_avg": "m", "exp_avg_sq_row": "v.row", "exp_avg_sq_col": "v.col"}
    found = {}
    for name, keys in zip(("matrix", "bias"), STATES[kind], strict=True):
        param = model.get_parameter(name)
        for key in keys:
            value = optimizer.state[param]
            for inner in paths.get(key, "v" if key == "exp_avg_sq" else key).split("."):
                value = value[inner]
            value = value["full"] if isinstance(value, dict) else value
            found[name, key] = value.view_as(param) if value.numel() == param.numel() else value
    return found


def parted(stage: int) -> None:
    """A parameter is saved without its engine, and keeps nothing of one that has ended."""
    engine = start(stage, "lomo", lr=0.1)
    matrix = engine.module.matrix
    if stage < 3:  # DeepSpeed's own parameters cannot be saved
        file = io.BytesIO()
        torch.save(matrix, file)
        assert len(file.getvalue()) < 4000
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False), matrix)
    engine.destroy()
    names = ("_hp_mapping", "_z3_optimizer", "get_full_hp_param", "set_full_hp_grad")
    assert not [n for n in names if hasattr(matrix, n)]


CASES: list[Any] = [(job, (stage,)) for job in (gradients, parted) for stage in STAGES]
CASES += [(weights, (stage, mode)) for stage in STAGES for mode in ("fp32", "master")]
CASES += [(weights, (3, "master24"))]
CASES += [(states, (stage, kind)) for stage in STAGES for kind in STATES]


@pytest.mark.parametrize("job, given", params(CASES, CASES[1::2]))
def test_what_is_read_and_set_is_whole(job, given):
    worlds.run(2, job, *given)
