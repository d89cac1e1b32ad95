"""Training by DeepSpeed's PipelineModule, and the same layers in one process: jobs."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import pipe
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from torch.nn import functional as F

from ds_ext.optimizer import OPTIMIZERS
from tests.common import engines, plain
from tests.common.ranks import logged, message

DualPipeVModule = pipe.DualPipeVModule
VOCAB, WIDTH, LENGTH, ROWS = 17, 12, 9, 12  # rows of a step, over all micro-batches and ranks
STEPS = 4


class Tokens(nn.Embedding):
    """An embedding that is the head's matrix too, and a vector that only its own use has."""

    def __init__(self) -> None:
        super().__init__(VOCAB, WIDTH)
        self.offset = nn.Parameter(torch.randn(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.offset


class Block(nn.Module):
    """Layers of several kinds, some of which get no gradient, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        change = torch.tanh(self.conv(h.transpose(1, 2))).transpose(1, 2)
        return h + self.gain * change * self.frozen(h)


def logits(tokens: Tokens, h: Tensor) -> Tensor:
    return h @ tokens.weight.T


def tanh(h: Tensor) -> Tensor:
    return torch.tanh(h)


def piped(layers: list[Any], num_stages: int = 2) -> PipelineModule:
    how: dict[str, Any] = {"loss_fn": F.mse_loss, "partition_method": "uniform"}
    return PipelineModule(layers, num_stages=num_stages, **how)


def without_parameters() -> list[float]:
    """The losses of a pipeline of three stages with nothing to train on the second."""
    net = piped([LayerSpec(nn.Linear, 4, 8), tanh, LayerSpec(nn.Linear, 8, 3)], 3)
    sizes = {"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2}
    adalomo = {"type": "AdaLomo", "params": {"lr": 0.05}}
    engine = engines.start(net, None, 1, gradient_clipping=1.0, optimizer=adalomo, **sizes)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)
    return [float(engine.train_batch(iter([(x, y)] * 2))) for _ in range(6)]


def loss(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out.float().flatten(0, 1), targets.flatten())


def specs(is_tied: bool = True) -> list[Any]:
    """The layers of the model, the same for any number of stages."""
    first: Any = LayerSpec(nn.Embedding, VOCAB, WIDTH)
    last: Any = LayerSpec(nn.Linear, WIDTH, VOCAB)
    if is_tied:
        first = TiedLayerSpec("tokens", Tokens)
        last = TiedLayerSpec("tokens", Tokens, forward_fn=logits)
    middle = [LayerSpec(nn.Linear, WIDTH, 13), tanh, LayerSpec(nn.Linear, 13, WIDTH)]
    return [first, *middle, LayerSpec(Block), LayerSpec(nn.LayerNorm, WIDTH), last]


class Chain(nn.Module):
    """The same layers in one process, under the same names."""

    def __init__(self, is_tied: bool = True) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self.layers: list[Any] = []
        for i, spec in enumerate(specs(is_tied)):
            if isinstance(spec, TiedLayerSpec):
                if spec.key not in self.tied_modules:
                    self.tied_modules[spec.key] = spec.build()
                module = self.tied_modules[spec.key]
                use = spec.forward_fn
                self.layers.append(module if use is None else lambda h, m=module, u=use: u(m, h))
            elif isinstance(spec, LayerSpec):
                self.add_module(str(i), spec.build())
                self.layers.append(self.get_submodule(str(i)))
            else:
                self.layers.append(spec)

    def forward(self, tokens: Tensor) -> Tensor:
        h = tokens
        for layer in self.layers:
            h = layer(h)
        return loss(h, tokens.roll(-1, 1))


def rows(step: int) -> Tensor:
    """The tokens of one step, [ROWS, LENGTH]."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)


@dataclass(frozen=True)
class Run:
    rule: str
    hypers: dict[str, Any] = field(default_factory=dict)
    stages: int = 2
    zero: int = 1
    more: dict[str, Any] = field(default_factory=dict)  # keys of the config
    is_tied: bool = True
    micro_batches: int = 4  # over all ranks of data parallelism
    checkpointing: int = 0  # layers in a segment
    client: bool = False  # an optimizer object, all parameters in one group; else the JSON config


def start(run: Run) -> deepspeed.PipelineEngine:
    """An engine whose weights are the same for any number of stages."""
    net = PipelineModule(
        specs(run.is_tied),
        num_stages=run.stages,
        loss_fn=loss,
        seed_layers=True,
        partition_method="uniform",
        activation_checkpoint_interval=run.checkpointing,
        # Reentrant checkpoints need inputs that have gradients, which tokens have not.
        checkpointable_layers=["Linear", "Block", "LayerNorm"] if run.checkpointing else None,
    )
    net.seed_layers = False
    with torch.no_grad():  # of a tied layer DeepSpeed's seeds make another one on each stage
        torch.manual_seed(3)
        for name, param in net.tied_modules.named_parameters():
            param.copy_(torch.randn(param.shape) if "offset" not in name else param)
    ranks = dist.get_world_size() // run.stages
    sizes = {"train_micro_batch_size_per_gpu": ROWS // run.micro_batches}
    sizes |= {"gradient_accumulation_steps": run.micro_batches // ranks, "steps_per_print": 10**6}
    named = {"optimizer": {"type": f"ds_ext.{run.rule}", "params": run.hypers}}
    optimizer = OPTIMIZERS[run.rule](net.parameters(), **run.hypers) if run.client else None
    more = sizes | ({} if run.client else named) | {"zero": {"reduce_bucket_size": 300}}
    # On a CPU DeepSpeed refuses fp16, which torch knows there.
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True):
        return engines.start(net, optimizer, run.zero, **more | run.more)


def batches(engine: deepspeed.PipelineEngine, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    grid = engine.grid
    own = rows(step).chunk(grid.data_parallel_size)[grid.data_parallel_id]
    for tokens in own.split(engine.micro_batch_size):
        yield tokens, tokens.roll(-1, 1)


def train(run: Run) -> dict[str, Any]:
    """This stage's weights before and after, and what was told of the steps."""
    with logged() as said:
        engine = start(run)
    filled = mock.Mock(side_effect=engine.buffered_allreduce_fallback)
    engine.buffered_allreduce_fallback = filled
    before, losses, norms, metrics = plain.weights(engine.module), [], [], []
    for step in range(STEPS):
        losses.append(float(engine.train_batch(batches(engine, step))))
        norms.append(engine.get_global_grad_norm())
        metrics.append(engine.optimizer.metrics())
    return {
        "losses": losses,
        "norms": norms,
        "metrics": metrics,
        "evaluated": float(engine.eval_batch(batches(engine, STEPS))),
        "said": said,
        "averaged by DeepSpeed": filled.call_count,
        "before": before,
        "after": plain.weights(engine.module),
        "seen": [float(b) for n, b in engine.module.named_buffers() if n.endswith("seen")],
        "counts": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "groups": [
            (g["lr"], g["weight_decay"], [engine.param_names[p] for p in g["params"]])
            for g in engine.optimizer.param_groups
        ],
        "steps": {engine.param_names[p]: s["step"] for p, s in engine.optimizer.state.items() if s},
    }


def go_on(run: Run, folder: str, first: int, last: int) -> dict[str, Any]:
    """Steps ``first`` to ``last``, from a checkpoint if there is one; then saves another."""
    engine = start(run)
    before, client = plain.weights(engine.module), None
    if first:
        with torch.no_grad():
            for param in engine.module.parameters():
                param.add_(1)  # what is not loaded is wrong
        path, client = engine.load_checkpoint(folder)
        assert path.endswith(str(first))
    for step in range(first, last):
        engine.train_batch(batches(engine, step))
    engine.save_checkpoint(folder, tag=str(last), client_state={"saved after": last})
    return {
        "before": before,
        "after": plain.weights(engine.module),
        "client": client,
        "seen": {n: b.clone() for n, b in engine.module.named_buffers()},
        "steps": engine.global_steps,
        "lr": engine.get_lr(),
        "files": sorted(path.name for path in Path(folder, str(last)).iterdir()),
    }


def faulty(run: Run, stage: int, data: int) -> dict[str, Any]:
    """A gradient of one rank of one stage is not a number in one micro-batch of step 1."""
    engine = start(run)
    grid, step, seen = engine.grid, 0, 0
    if (grid.get_stage_id(), grid.data_parallel_id) == (stage, data):
        param = next(engine.module.get_submodule(str(3 * stage + 1)).parameters())

        def poison(grad: Tensor) -> Tensor:
            nonlocal seen
            seen += step == 1
            return grad * float("nan") if seen == 1 and step == 1 else grad

        param.register_hook(poison)
    weights, scales = [plain.weights(engine.module)], []
    with logged() as said:
        for step in range(STEPS):
            engine.train_batch(batches(engine, step))
            weights.append(plain.weights(engine.module))
            scales.append(engine.optimizer.loss_scale)
    trained = {n for n, p in engine.module.named_parameters() if p.requires_grad}
    moved = [
        {n for n in trained if not torch.equal(a[n], b[n])}
        for a, b in zip(weights, weights[1:], strict=False)
    ]
    return {
        "moved": moved,
        "skipped": engine.skipped_steps,
        "metrics": engine.optimizer.metrics(),
        "scales": scales,
        "said": said,
    }


class Weighted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(super().forward(out), targets)


def is_complex(layer: nn.Module) -> None:
    layer.phase = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))


def is_cut(layer: nn.Module) -> None:
    layer.weight.ds_tensor = layer.weight.detach()  # as deepspeed.zero.Init does


def has_vector(layer: nn.Module) -> None:
    layer.bias = nn.Parameter(torch.zeros(3))


SOON = 25  # seconds; who waits for a rank that has raised is told after 30


def refuse(net: PipelineModule, *words: str, client: Any = None, **more: Any) -> None:
    """Asserts that all ranks are told soon, at ``initialize``, with these words."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 3}
    if client is None:
        config["optimizer"] = {"type": "AdaLomo", "params": {}}
    began = time.monotonic()
    told = message(lambda: deepspeed.initialize(model=net, optimizer=client, config=config | more))
    assert all(part in told for part in words) and time.monotonic() - began < SOON, told


def unlike() -> None:
    """One rank of the second stage has frozen its layer."""
    net = piped([LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 3)])
    net.requires_grad_(dist.get_rank() != 3)
    refuse(net, "ranks 2, 3: ", "rank 2 and rank 3 differ in", "different parameters")


def refusals() -> None:

    def usual(kind: Any = PipelineModule, **how: Any) -> Any:
        return kind(specs(), **{"num_stages": 2, "loss_fn": loss} | how, partition_method="uniform")

    def adalomo(**params: Any) -> dict[str, Any]:
        return {"type": "AdaLomo", "params": params}

    for stage in (2, 3):
        named = f"zero_optimization.stage = {stage}"
        refuse(usual(), named, "0 or 1", zero_optimization={"stage": stage})
    fused = "PipelineModule needs kept gradients", 'ds_ext.gradient_policy = "fused"', "remove"
    refuse(usual(), *fused, ds_ext={"gradient_policy": "fused"})
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
    refuse(usual(num_stages=None, topology=topology), '"model" axis', "remove it")
    refuse(usual(), "optimizer.params.lrr", '"lr"', optimizer=adalomo(lrr=1))
    unmatched = adalomo(param_groups=[{"match": "no such name", "lr": 1e-3}])
    there = "param_groups[0].match", "tied_modules.tokens.weight", "conv.weight"
    refuse(usual(), *there, optimizer=unmatched)
    net = usual()
    net.tied_modules["tokens"].weight.requires_grad_(net.stage_id == 0)
    refuse(net, "tied_modules.tokens.weight is tied", "requires_grad")
    untied = "loss_fn.weight is on several stages and not tied", "TiedLayerSpec"
    refuse(usual(loss_fn=Weighted()), *untied)
    refuse(usual(DualPipeVModule), "DualPipeVModule", "use PipelineModule")
    for spoil, words in {  # what the second stage alone has; the first is told as well
        is_complex: ["rank 1: AdaLomo: a parameter of shape [2, 2] is torch.complex64"],
        is_cut: ["rank 1: zero_optimization.stage = 0: the model's parameters are partitioned"],
        has_vector: ["rank 1: Muon supports only matrices", "[3]"],
    }.items():
        layers = [LayerSpec(nn.Linear, 4, 4, bias=False), LayerSpec(nn.Linear, 4, 3, bias=False)]
        net = piped(layers)
        if net.stage_id == 1:
            spoil(net.get_submodule("1"))
        muon = OPTIMIZERS["muon"](net.parameters()) if spoil is has_vector else None
        refuse(net, *words, client=muon)
