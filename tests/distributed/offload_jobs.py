"""Jobs of test_offload.py: runs with and without offload, on a pretended device or the CPU."""

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_ext.ops import normal, quantize, rounding
from ds_ext.optimizer import OPTIMIZERS, host_offload
from tests.common import by_role, engines, pretend
from tests.common.ranks import message, shared_folder, whole
from tests.common.states import tensors
from tests.distributed.resume_jobs import KINDS

STEPS = 3
SLACK = 64  # bytes of scalars: a loss, a norm
HYPERS = KINDS | {
    "adafactor": ("adafactor", {"lr": 0.05, "relative_step": False}),
    "adafactor beta1": KINDS["adafactor"],
    "apollomini": ("apollomini", {"lr": 0.01, "update_proj_gap": 2}),
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


def start(kind: str, stage: int, offload: dict[str, Any], more: dict[str, Any]):
    """An engine; ``more`` is merged into the config, but for the optimizer's ``hypers``."""
    name, hypers = HYPERS[kind]
    more = dict(more)
    hypers = hypers | more.pop("hypers", {})
    zero_init = more.pop("zero_init", False)
    is_json = more.pop("is_json", False)
    zero = {"stage3_param_persistence_threshold": 45, "stage3_prefetch_bucket_size": 1000}
    config = engines.config(stage, zero=zero | {"reduce_bucket_size": 1800} | offload, **more)
    torch.manual_seed(5)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=zero_init):
        model = Tower()
    if is_json or name in by_role.MATRICES:
        config["optimizer"] = {"type": f"ds_ext.{name}", "params": hypers}
        return deepspeed.initialize(model=model, config=config)[0]
    optimizer = OPTIMIZERS[name](model.parameters(), **hypers)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def rows(engine: deepspeed.DeepSpeedEngine, number: int) -> Tensor:
    x = engines.rows(number, dist.get_rank(), 3, 12)
    return x.to(engine.device).to(next(engine.module.parameters()).dtype)


def steps(engine: deepspeed.DeepSpeedEngine, numbers: range) -> list[float]:
    def loss_of(engine: Any, number: int, rank: int) -> Tensor:
        return engine(rows(engine, number))

    norms = engines.train(engine, loss_of, numbers, engine.gradient_accumulation_steps())
    return [float(norm) for norm in norms]


def weights(engine: deepspeed.DeepSpeedEngine) -> dict[str, Tensor]:
    return {n: p.cpu() for n, p in whole(engine.module).items()}


Case = tuple[str, int, str, tuple[str, ...]]  # optimizer, stage, how, kinds of offload
PARAM = {"offload_param": {"device": "cpu"}}
STATE = {"offload_optimizer": {"device": "cpu"}}
BOTH = PARAM | STATE
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "param": PARAM,
    "param, not pinned": {"offload_param": {"device": "cpu", "pin_memory": False}},
    "state": STATE,
    "both": BOTH,
}
BF16 = {"bf16": {"enabled": True}}
CLIPPED = {"gradient_clipping": 0.5}
HOW: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "bf16 master": BF16 | {"hypers": {"weight_update": "master"}},
    "bf16 master24": BF16 | {"hypers": {"weight_update": "master24"}},
    "fp16 master": {
        "fp16": {"enabled": True, "loss_scale": 8},
        "hypers": {"weight_update": "master"},
    },
    "averaged": BF16 | {"hypers": {"ema_decay": 0.9}},
    "clipped": BF16 | CLIPPED,
    "accumulated": BF16 | CLIPPED | {"gradient_accumulation_steps": 2},
    "zero init": BF16 | {"zero_init": True, "is_json": True, "ds_ext": {"measure_updates": True}},
}


@contextlib.contextmanager
def place(pretended: bool) -> Iterator[pretend.Memory | None]:
    """Where all runs of a process are; however small a state is, it is offloaded."""
    device = pretend.device() if pretended else contextlib.nullcontext()
    with mock.patch.object(host_offload, "SMALL", 0), device as memory:
        if memory is not None:  # constants that the first run would make
            rounding.noise_table(pretend.DEVICE)
            normal._quantiles(pretend.DEVICE)
            for signed in (True, False):
                quantize._book(signed, pretend.DEVICE)
        yield memory


def trained(
    optimizer: str, stage: int, offload: dict[str, Any], how: str, memory: pretend.Memory | None
) -> dict[str, Any]:
    """The weights after some steps; where they lay, and bytes that were on the device."""
    if memory is not None:
        memory.begin()
    engine = start(optimizer, stage, offload, HOW[how])
    if memory is not None:
        pinned, memory.copied = memory.accelerator.pinned, {"in": 0, "out": 0}
    norms = steps(engine, range(STEPS))
    found = {"norms": norms, "where": where(engine)}
    if memory is not None:
        found |= {"copied": dict(memory.copied), "pinned": pinned, **on_host(engine)}
        peak = memory.peak  # rules are tried on the host
        gc.collect()
        kept = kept_on_device(engine)
        found |= {"kept": kept, "alive": settled(memory, kept), "peak": peak}
    found["weights"] = weights(engine)
    if how == "averaged":
        with engine.optimizer.ema():
            found["averages"] = weights(engine)
        found["restored"] = weights(engine)
    engine.destroy()
    return found


def settled(memory: pretend.Memory, expected: int) -> int:
    """Bytes on the device, soon: gloo's threads let go of what they have sent a little later."""
    until = time.monotonic() + 5
    while memory.alive() > expected + SLACK and time.monotonic() < until:
        time.sleep(0.01)
    return memory.alive()


def where(engine: deepspeed.DeepSpeedEngine) -> dict[str, set[str]]:
    adapter = engine.optimizer
    held = [x for state in adapter.state.values() for x in tensors(state)]
    runs = [adapter.layout.run(p) for p in engine.module.parameters()]
    return {"runs": {str(x.device) for x in runs}, "states": {str(x.device) for x in held}}


def kept_on_device(engine: deepspeed.DeepSpeedEngine) -> int:
    """Bytes of the weights and states that ought to be alive on the device between steps."""
    adapter, params = engine.optimizer, list(engine.module.parameters())
    runs = [getattr(p, "ds_tensor", p.data) for p in params]
    gathered = [p.data for p in params if getattr(p, "ds_persist", False)]
    held = [x for state in adapter.state.values() for x in tensors(state)]
    return sum(x.nbytes for x in (*runs, *gathered, *held) if x.device == pretend.DEVICE)


def on_host(engine: deepspeed.DeepSpeedEngine) -> dict[str, int]:
    """Bytes that lie on the host: of runs, of those that are stepped, of states."""
    adapter = engine.optimizer
    runs = {p: adapter.layout.run(p) for p in engine.module.parameters()}
    runs = {p: run for p, run in runs.items() if run.device == pretend.HOST}
    held = [x for state in adapter.state.values() for x in tensors(state)]
    return {
        "partitions": sum(p.ds_tensor.nbytes for p in runs),
        "stepped": sum(run.nbytes for p, run in runs.items() if p.requires_grad),
        "states": sum(x.nbytes for x in held if x.device == pretend.HOST),
    }


def compared(case: Case, pretended: bool) -> dict[str, dict[str, Any]]:
    optimizer, stage, how, kinds = case
    with place(pretended) as memory:
        return {k: trained(optimizer, stage, KINDS[k], how, memory) for k in ("none", *kinds)}


def resumed(optimizer: str, how: str, way: str) -> dict[str, Any]:
    """Weights of a run without a break, and of one saved and gone on from with other offload."""
    passes = HOW[how].get("gradient_accumulation_steps", 1)
    before, after = {"to": ({}, BOTH), "from": (BOTH, {}), "param": (PARAM, PARAM)}[way]
    saved, last = passes, STEPS * passes

    def train(engine: deepspeed.DeepSpeedEngine, first: int, last: int) -> None:
        for number in range(first, last):
            engine.backward(engine(rows(engine, number)))
            engine.step()

    with shared_folder() as folder, place(pretended=True):
        first, second = (start(optimizer, 3, offload, HOW[how]) for offload in (before, after))
        train(first, 0, saved)
        first.save_checkpoint(folder)
        second.load_checkpoint(folder)
        found: dict[str, Any] = {"where": where(second)}
        for name, engine in (("unbroken", first), ("resumed", second)):
            train(engine, saved, last)
            found[name] = weights(engine)
            engine.destroy()
    return found


def lent(stage: int, how: str) -> dict[str, Any]:
    """A run whose memory is lent within a step, or between steps, beside one that goes through."""
    found: dict[str, Any] = {}
    with place(pretended=True) as memory:
        assert memory is not None
        for lends in (False, True):
            engine = start("came", stage, {}, HOW[how])
            steps(engine, range(1))
            for _ in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(rows(engine, 0)))
                if lends:
                    found |= _lend(engine, rows(engine, 0))
                engine.step()
            steps(engine, range(1, STEPS))
            found[f"weights {lends}"] = weights(engine)
            engine.destroy()
    return found


def _lend(engine: deepspeed.DeepSpeedEngine, x: Tensor) -> dict[str, Any]:
    """Where all lies before, while and after the engine's memory is lent; errors meanwhile."""
    before = where(engine)
    engine.offload_states(include=["optim_states"])
    part = where(engine)
    torch.no_grad()(engine.forward)(x)  # reads weights only
    engine.offload_states()
    held = [run.g for run in engine.optimizer.fused.state.kept.values()]
    found = {
        "before": before,
        "part": part,
        "lent": where(engine) | {"gradients": {str(g.device) for g in held}},
        "kept": kept_on_device(engine),
        "messages": [message(lambda: engine(x)), message(engine.step)],
    }
    engine.reload_states()
    return found | {"after": where(engine)}
