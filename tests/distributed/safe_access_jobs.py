"""Jobs that read and set weights, gradients and states by DeepSpeed's safe_* functions."""

import io
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import utils
from torch import nn

from ds_ext.optimizer import OPTIMIZERS
from tests.common import engines
from tests.common.ranks import message, whole


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


def weights(stage: int, mode: str, dtype: torch.dtype) -> dict[str, Any]:
    """Weights as they are read and as they are after they were set, and used in a step."""
    master = {"weight_update": mode} if dtype == torch.bfloat16 else {}
    engine = start(stage, "lomo", dtype=dtype, lr=1e-3, **master)
    step(engine, 0)
    model = engine.module
    got = {n: utils.safe_get_full_fp32_param(p) for n, p in model.named_parameters()}
    frozen = getters(model.frozen)
    held = whole(engine.module)
    value = got["matrix"] + 1 / 3
    utils.safe_set_full_fp32_param(model.matrix, value)
    utils.safe_set_full_fp32_param(model.bias, got["bias"] * 2)
    local = ""
    if stage == 3:
        local = message(lambda: utils.safe_get_local_fp32_param(model.bias), AttributeError)
    after = {n: utils.safe_get_full_fp32_param(p) for n, p in model.named_parameters()}
    return {
        "got": got,
        "held": held,
        "frozen": frozen,
        "set": (value, got["bias"] * 2),
        "local": local,
        "after": after,
        "used": whole(engine.module),
        "wrong size": message(lambda: utils.safe_set_full_fp32_param(model.matrix, value[1:])),
    }


def gradients(stage: int) -> dict[str, Any]:
    """Gradients that are kept, then doubled by hand -> what LOMO did with them."""
    engine = start(stage, "lomo", "sharded", lr=0.1)
    model, rank = engine.module, dist.get_rank()
    too_early = message(lambda: utils.safe_get_full_grad(model.matrix))
    before = whole(engine.module)
    engine.backward(loss_of(engine, 0, rank))
    got = {n: utils.safe_get_full_grad(p) for n, p in model.named_parameters()}
    utils.safe_set_full_grad(model.matrix, 2 * got["matrix"])
    utils.safe_update_full_grad_vectorized([model.bias], lambda g, p: 2 * g)
    engine.step()
    after = whole(engine.module)
    engine.backward(loss_of(engine, 1, rank))
    utils.safe_set_full_grad(model.matrix, got["matrix"] * torch.nan)
    engine.step()
    fused = start(stage, "lomo", "fused", lr=0.1)
    fused.backward(loss_of(fused, 0, rank))
    used_up = message(lambda: utils.safe_get_full_grad(fused.module.matrix))
    return {
        "before": before,
        "got": got,
        "after": after,
        "skipped": whole(engine.module),
        "norm": engine.get_global_grad_norm(),
        "messages": (too_early, used_up),
    }


STATES = {  # by optimizer: names of what it keeps of a matrix and of a vector
    "lamb": (("exp_avg", "exp_avg_sq"), ("exp_avg", "v")),
    "came": (("exp_avg", "exp_avg_sq_row", "exp_avg_sq_col", "r.row"), ("m", "exp_avg_sq")),
    "galoreadamw": (("exp_avg", "exp_avg_sq", "q"), ("exp_avg", "exp_avg_sq")),
}


def states(stage: int, kind: str) -> dict[str, Any]:
    """States by all of their names, and after they were set."""
    more = {"rank": 2} if kind == "galoreadamw" else {}
    engine = start(stage, kind, lr=1e-3, **more)
    model, get = engine.module, utils.safe_get_full_optimizer_state
    too_early = message(lambda: get(model.matrix, STATES[kind][0][0]))
    for number in range(2):
        step(engine, number)
    got, after = {}, {}
    for name, keys in zip(("matrix", "bias"), STATES[kind], strict=True):
        param = model.get_parameter(name)
        for key in keys:
            value = get(param, key)
            utils.safe_set_full_optimizer_state(param, value + 1, key)
            got[name, key] = value
            after[name, key] = get(param, key) - 1
    return {
        "got": got,
        "after": after,
        "frozen": get(model.frozen, "exp_avg"),
        "messages": (too_early, message(lambda: get(model.matrix, "exp_avgs"))),
    }


def parted(stage: int) -> tuple[bool, list[str]]:
    """Whether a parameter is saved without its engine; and what it keeps of one that has ended."""
    engine = start(stage, "lomo", lr=0.1)
    matrix = engine.module.matrix
    saved = True
    if stage < 3:  # DeepSpeed's own parameters cannot be saved
        file = io.BytesIO()
        torch.save(matrix, file)
        saved = len(file.getvalue()) < 4000
        file.seek(0)
        saved &= torch.equal(torch.load(file, weights_only=False), matrix)
    engine.destroy()
    names = ("_hp_mapping", "_z3_optimizer", "get_full_hp_param", "set_full_hp_grad")
    return saved, [n for n in names if hasattr(matrix, n)]
