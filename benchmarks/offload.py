"""Time and GPU memory of offload, with steps in flight or on the host.

It measures the step alone in both ways (ds_ext steps in flight: see optimizer/host_offload.py), and
complete training steps under ZeRO-3. It needs a GPU.
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import report
from benchmarks.memory import DTYPES, LLAMAS, llama, shapes_of
from benchmarks.train import MODELS, join_world_of_one
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer
from ds_ext.optimizer.host_offload import HOST, HostOffload
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.planner.memory import nbytes

DEVICE, FLIGHT, PAGED = "on the GPU, nothing offloaded", "in flight", "in flight, not pinned"
BOTH, BY_HOST = "in flight, state too", "by the host, state too"
COPIES = "weights in and out alone"
WAYS = (DEVICE, FLIGHT, PAGED, BOTH, BY_HOST, COPIES)
CPU = {"device": "cpu"}
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "param": {"offload_param": CPU},
    "param, not pinned": {"offload_param": CPU | {"pin_memory": False}},
    "param and optimizer": {"offload_param": CPU, "offload_optimizer": CPU},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = ("adalomo", "came", "lamb")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(known))
    parser.add_argument("--layers", choices=LLAMAS, default="7B", help="step one layer of this")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["1B", "7B"])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--length", type=int, default=2048, help="tokens per training step")
    parser.add_argument("--rounds", type=int, default=10)


def main(args: argparse.Namespace) -> None:
    """Times each step, and writes the tables."""
    if not torch.cuda.is_available():
        raise SystemExit("python -m benchmarks offload needs a GPU: nothing travels without one.")
    device = torch.device("cuda", torch.cuda.current_device())
    shapes = [
        shape
        for name, shape in shapes_of(LLAMAS[args.layers]).items()
        if name.startswith("model.layers.0.") and len(shape) == 2
    ]
    steps: list[dict[str, object]] = []
    for name in args.optimizers:
        steps += alone(OPTIMIZERS[name], shapes, DTYPES[args.dtype], device, args.rounds)
        print(report.table(steps[-len(WAYS) :]), flush=True)
        gc.collect()
    whole: list[dict[str, object]] = []
    for model in args.models:
        for name in args.optimizers:
            jobs = [
                Job(model, name, kind, args.dtype, args.length, args.rounds) for kind in OFFLOADS
            ]
            whole += [job.row(job.isolated()) for job in jobs if job.is_possible]
            print(report.table(whole), flush=True)
    text = TEXT.format(**vars(args))
    tables = {f"The step of a layer of {args.layers}": steps, "Training steps": whole}
    report.write("offload", "Offload", text, tables, None)


TEXT = """
Weights and gradients are {dtype}. In the first table, gradients are on the GPU, and weights and
states are in the place that the row names. Parameters are stepped one after another. "by the host"
copies the gradient to the CPU and steps there with all threads of torch. "Same bits" compares the
weights with those of the first row after the same number of steps. "Stays on the GPU" and "peak" do
not include the gradients. Times are medians of {rounds} rounds, in which the rows take turns.

Training steps run in one process under ZeRO-3, with random weights and {length} random tokens. The
table shows all memory that torch has allocated on the GPU, between steps and at the peak of a step.
"""


class Layer:
    """Parameters that are stepped in one way with ``grads``, which are on ``device``."""

    def __init__(
        self,
        cls: type[RuleOptimizer],
        way: str,
        weights: list[Tensor],
        grads: list[Tensor],
        device: torch.device,
    ) -> None:
        self.way, self.device, self.grads = way, device, grads
        self.shapes = [tuple(p.shape) for p in weights]
        pins = device.type == "cuda"
        flat = [p.reshape(-1) for p in weights]
        if way == DEVICE:
            self.runs = [p.to(device, copy=True) for p in flat]
        else:
            is_pinned = pins and way != PAGED
            self.runs = [p.pin_memory() if is_pinned else p.clone() for p in flat]
        self.landing = [torch.empty_like(p, pin_memory=pins) for p in flat if way == BY_HOST]
        own = {"relative_step": False, "lr": 1e-3} if cls is OPTIMIZERS["adafactor"] else {}
        self.optimizer = cls([nn.Parameter(p) for p in self.runs], **own)
        self.optimizer.set_offload(HostOffload(pins) if way == BOTH else None)

    def step(self) -> None:
        if self.way == COPIES:
            for run in self.runs:
                run.copy_(run.to(self.device, non_blocking=True), non_blocking=True)
            return
        for i, param in enumerate(self.optimizer.group_of):
            g = self.grads[i]
            if self.way == BY_HOST:
                g = self.landing[i].copy_(g, non_blocking=True)
                wait(self.device)
            shard = Shard.whole(self.shapes[i])
            self.optimizer.update([RunUpdate(param, self.runs[i], g, shard)], lambda total: None)

    @property
    def stays(self) -> int:
        """The bytes of weights and states on the device between steps."""
        states = list(self.optimizer.state.values())
        return sum(nbytes(only(x, self.device)) for x in (self.runs, *states))


def only(x: Any, device: torch.device) -> Any:
    """Returns the tensors on ``device``, out of nested tensors."""
    if isinstance(x, Tensor):
        return x if x.device == device else ()
    inner = x.values() if isinstance(x, Mapping) else x if isinstance(x, list) else ()
    return [only(y, device) for y in inner]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def alone(
    cls: type[RuleOptimizer],
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
) -> list[dict[str, object]]:
    """Returns rows with the time of an optimizer's step in each way."""
    random = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=random).mul_(0.02).to(dtype) for shape in shapes]
    grads = [torch.randn(p.numel(), generator=random).mul_(0.1).to(dtype) for p in weights]
    grads = [g.to(device) for g in grads]
    layers = {way: Layer(cls, way, weights, grads, device) for way in WAYS}
    steps = {way: layer.step for way, layer in layers.items()}
    times = report.interleaved(steps, rounds, lambda: wait(device))
    first = [run.to(HOST) for run in layers[DEVICE].runs]  # before peaks are measured
    same = {
        way: all(torch.equal(a, b.to(HOST)) for a, b in zip(first, layer.runs, strict=True))
        for way, layer in layers.items()
    }
    peaks = {way: transient(layer.step, device) for way, layer in layers.items()}
    moved = sum(run.nbytes for run in first)
    return [
        {
            "optimizer": cls.__name__,
            "way": way,
            "ms": 1e3 * statistics.median(times[way]),
            f"time / {FLIGHT}": report.ratios(times, FLIGHT)[way][0],
            "weights, GB/s each way": moved / statistics.median(times[way]) / 1e9,
            "same bits": "" if way == COPIES else "yes" if same[way] else "no",
            "stays on the GPU, MB": layer.stays / 1e6,
            "peak, MB": None if peaks[way] is None else (layer.stays + peaks[way]) / 1e6,
        }
        for way, layer in layers.items()
    ]


def transient(step: Callable[[], None], device: torch.device) -> int | None:
    """Returns the peak GPU bytes that a step allocates in addition to existing tensors."""
    if device.type != "cuda":
        return None
    wait(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    wait(device)
    return torch.cuda.max_memory_allocated(device) - before


class Taken(NamedTuple):
    """The time and memory of a training step."""

    seconds: float  # median
    between: int  # bytes on the GPU between steps
    peak: int


class Job(NamedTuple):
    """A training run."""

    model: str
    optimizer: str
    offload: str
    dtype: str
    length: int
    rounds: int

    @property
    def is_possible(self) -> bool:
        """Whether the optimizer has the state that would be offloaded."""
        return "optimizer" not in self.offload or self.optimizer in ("came", "lamb", "galoreadamw")

    def isolated(self) -> Taken | None:
        """Returns the result of a measurement in a new process; None if it runs out of memory."""
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            try:
                return pool.submit(self.measure).result()
            except torch.OutOfMemoryError:
                return None

    def measure(self) -> Taken:
        import deepspeed

        import ds_ext  # noqa: F401

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda" if on_gpu else "cpu")
        if not torch.distributed.is_initialized():
            join_world_of_one()
            deepspeed.init_distributed("nccl" if on_gpu else "gloo", verbose=False)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": self.dtype == "bf16"},
            "zero_optimization": {"stage": 3, **OFFLOADS[self.offload]},
            "optimizer": {"type": self.optimizer, "params": {}},
        }
        model = llama(MODELS[self.model], DTYPES[self.dtype], device)
        engine = deepspeed.initialize(model=model, config=config)[0]
        batch = torch.randint(0, MODELS[self.model][0], (1, self.length), device=device)

        def step() -> None:
            engine.backward(engine(batch, labels=batch).loss)
            engine.step()

        times = report.interleaved({"": step}, self.rounds, lambda: wait(device))[""]
        gc.collect()
        between = torch.cuda.memory_allocated() if on_gpu else 0
        peak = (transient(step, device) or 0) + between
        engine.destroy()
        return Taken(statistics.median(times), between, peak)

    def row(self, taken: Taken | None) -> dict[str, object]:
        """Returns a row of the table."""
        shown = {"model": self.model, "optimizer": self.optimizer, "offload": self.offload}
        if taken is None:
            return shown | {"s": "does not fit", "between steps, GB": None, "peak, GB": None}
        figures = {"between steps, GB": taken.between / 1e9, "peak, GB": taken.peak / 1e9}
        return shown | {"s": taken.seconds, **figures}
