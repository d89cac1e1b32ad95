"""Jobs of test_offload.py: runs with and without offload, on a pretended device or the CPU."""

import contextlib
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_ext import home
from ds_ext.optimizer import OPTIMIZERS
from tests import pretend

STEPS = 4
HYPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lomo": ("lomo", {"lr": 0.1}),
    "adalomo": ("adalomo", {"lr": 0.05}),
    "adafactor": ("adafactor", {"lr": 0.05, "relative_step": False}),
    "adafactor beta1": ("adafactor", {"lr": 0.05, "relative_step": False, "beta1": 0.9}),
    "came": ("came", {"lr": 2e-3}),
    "lamb": ("lamb", {"lr": 0.05}),
    "galore": ("galoreadamw", {"lr": 0.05, "rank": 3, "update_proj_gap": 2}),
    "galore right": ("galoreadamw", {"lr": 0.05, "rank": 3, "proj_type": "right"}),
    "galore 8-bit": ("galoreadamw", {"lr": 0.05, "rank": 3, "nbits": 8, "min_8bit_size": 100}),
}


class Tower(nn.Module):
    """Linear layers, a norm and a scale of their own; the biases stay gathered under ZeRO-3."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 41)
        self.second = nn.Linear(41, 41)
        self.frozen = nn.Linear(41, 41).requires_grad_(False)
        self.norm = nn.LayerNorm(41)
        self.last = nn.Linear(41, 7)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = self.norm(self.second(h)) + self.frozen(h)
        return self.last(h).float().square().mean()


def start(optimizer: str, stage: int, offload: dict[str, Any], more: dict[str, Any]):
    """An engine; ``more`` is merged into the config, but for the optimizer's ``hypers``."""
    name, hypers = HYPERS[optimizer]
    more = dict(more)
    hypers = hypers | more.pop("hypers", {})
    zero_init = more.pop("zero_init", False)
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 45,
        "stage3_prefetch_bucket_size": 1000,
        "reduce_bucket_size": 1800,
    }
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": zero | offload,
        "gradient_clipping": 0.0,
        **more,
    }
    torch.manual_seed(5)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=zero_init):
        model = Tower()
    optimizer = OPTIMIZERS[name](model.parameters(), **hypers)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def steps(engine: deepspeed.DeepSpeedEngine, numbers: range) -> list[float]:
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    norms = []
    for step in numbers:
        for part in range(engine.gradient_accumulation_steps()):
            seed = 100 * step + 10 * part + dist.get_rank()
            x = torch.randn(3, 12, generator=torch.Generator().manual_seed(seed))
            engine.backward(engine(x.to(engine.device).to(dtype)))
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def whole(engine: deepspeed.DeepSpeedEngine) -> dict[str, Tensor]:
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, enabled=engine.zero_optimization_stage() == 3):
        return {n: p.detach().cpu().clone() for n, p in engine.module.named_parameters()}


def trained(
    optimizer: str,
    stage: int,
    offload: dict[str, Any],
    more: dict[str, Any],
    pretended: bool = True,
) -> dict[str, Any]:
    """The weights after some steps; and bytes on the device, at the end and at most."""
    device = pretend.device() if pretended else contextlib.nullcontext()
    with mock.patch.object(home, "SMALL", 0), device as memory:
        engine = start(optimizer, stage, offload, more)
        norms = steps(engine, range(STEPS))
        runs = {engine.param_names[p]: str(engine.optimizer.layout.run(p).device) for p in engine.module.parameters()}
        found = {"weights": whole(engine), "norms": norms, "runs": runs}
        if memory is not None:
            found |= {"alive": memory.alive(), "peak": memory.peak, "copied": memory.copied}
        return found
