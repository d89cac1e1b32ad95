"""Jobs that delete an engine, and look which of its objects are still alive."""

import gc
import weakref
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups
from torch import Tensor, nn

import ds_ext
from tests.common import int8_model
from tests.distributed import expert_parallel_jobs, int8_engines_jobs


class Dense(nn.Module):
    """A model of two layers, which may keep a part of its loss, and so the graph of the first."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        auxiliary = h.square().mean()
        if self.keeps:
            self.auxiliary = auxiliary
        return self.down(h).square().mean() + auxiliary


class Failing(torch.autograd.Function):
    """The identity, whose backward raises ArithmeticError."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError


def _engine(kind: str, stage: int, max_norm: float) -> Any:
    if kind == "int8":
        return int8_engines_jobs.engine_of(
            stage, int8_model.made(seed=1), gradient_clipping=max_norm
        )
    if kind == "experts":
        groups._create_expert_and_data_parallel(2)
    model = expert_parallel_jobs.Whole(2) if kind == "experts" else Dense(kind == "keeps")
    found: Any = [{"params": list(model.parameters()), "name": "all"}]
    if kind == "experts":
        found = split_params_into_different_moe_groups_for_optimizer(found)
    optimizer = ds_ext.AdamW(found, lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": max_norm,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _backward(engine: Any, kind: str) -> None:
    x = int8_model.batch(0, dist.get_rank()) if kind == "int8" else torch.randn(4, 5)
    engine.backward(engine(x))


def _use(engine: Any, kind: str, how: str) -> None:
    for _ in range({"step": 1, "steps": 3, "destroyed": 3}.get(how, 0)):
        _backward(engine, kind)
        engine.step()
    if how == "failure":
        last = list(engine.module.children())[-1]
        hook = last.register_forward_pre_hook(lambda _, x: Failing.apply(*x))
        try:
            _backward(engine, kind)
            raise AssertionError("backward did not fail")
        except ArithmeticError:
            hook.remove()


def _objects(engine: Any) -> dict[str, Any]:
    """Weak references to an engine and its parts."""
    adapter = engine.optimizer
    parts = {"engine": engine, "model": engine.module, "adapter": adapter}
    parts |= {"fused": adapter.fused, "optimizer": adapter.optimizer, "layout": adapter.layout}
    parts |= dict(engine.module.named_parameters())
    states = [x for kept in adapter.state.values() for x in kept.values() if torch.is_tensor(x)]
    parts |= {f"state {i}": x for i, x in enumerate(states)}
    return {name: weakref.ref(part) for name, part in parts.items()}


def left(kind: str, stage: int, how: str, max_norm: float) -> list[str]:
    """The names of an engine's parts that are alive after it was deleted."""
    engine = _engine(kind, stage, max_norm)
    _use(engine, kind, how)
    found = _objects(engine)
    has_stepped = how not in ("nothing", "failure")
    assert ("state 0" in found) == (has_stepped and kind != "int8")  # LOMO has no state
    if how == "destroyed":
        engine.destroy()
    del engine
    # After a failure, autograd keeps nodes that it has not run until its next pass in this thread.
    torch.ones(1, requires_grad=True).square().backward()
    gc.collect()
    return [name for name, part in found.items() if part() is not None]


def outlived() -> str:
    """The error of an access to a parameter whose engine was freed."""
    engine = _engine("dense", 1, 0.0)
    param = engine.module.up.weight
    del engine
    gc.collect()
    try:
        deepspeed.utils.safe_get_full_fp32_param(param)
    except RuntimeError as error:
        return str(error)
    return ""
