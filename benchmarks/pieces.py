"""A large batch in pieces, beside gradient accumulation and one whole batch: time, bytes, gathers.

Each way trains on the same number of rows per step, with the loss in chunks. Steps take turns.
"""

import argparse
import contextlib
import gc
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import ds_ext
from benchmarks import report
from benchmarks.growth import CPU, in_turns
from benchmarks.memory import llama
from benchmarks.ranks import apart, on_ranks
from benchmarks.train import MODELS
from benchmarks.trends import ratio
from ds_ext.forward import chunked_loss
from ds_ext.planner import options
from ds_ext.planner.live_memory import LiveMemory
from ds_ext.planner.rows import MemoryPlan

PIECES, ACCUMULATION, CHECKPOINTED = "pieces", "accumulation", "accumulation, checkpointing"
WHOLE = "whole batch"
WAYS = (PIECES, ACCUMULATION, CHECKPOINTED, WHOLE)
NOTHING_KEPT = {  # a model larger than DeepSpeed's limits: a layer is released after each use
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="10M")
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8, help="rows of a rank and step")
    parser.add_argument("--length", type=int, default=128, help="tokens per row")
    parser.add_argument("--bucket", type=int, default=2**18, help="elements")
    parser.add_argument("--rounds", type=int, default=7)


def main(args: argparse.Namespace) -> None:
    """Times and counts each way, and writes the tables."""
    tables = {}
    for title, ranks, stage in (
        ("One process, plain PyTorch", 1, None),
        ("Two ranks, ZeRO-2", 2, 2),
        ("Two ranks, ZeRO-3", 2, 3),
    ):
        of = (args.model, args.pieces, args.batch, args.length, args.bucket, stage)
        runs = {way: Run(way, *of) for way in WAYS}
        times = on_ranks(ranks, in_turns, runs, args.rounds)
        counts = {way: on_ranks(ranks, counted, run) for way, run in runs.items()}
        planned = {way: apart(run.planned, ranks) for way, run in runs.items()}
        tables[title] = [
            {
                "way": way,
                f"seconds / {WHOLE}": ratio(times.seconds, way, WHOLE),
                f"CPU seconds / {WHOLE}": ratio(times.cpu, way, WHOLE),
                f"CPU seconds / {ACCUMULATION}": ratio(times.cpu, way, ACCUMULATION),
                "peak, MiB": counts[way].peak / 2**20,
                "planned": planned[way] / 2**20,
                "gathers of a layer": max(counts[way].gathers.values(), default=0),
            }
            for way in WAYS
        ]
        print(report.table(tables[title]), flush=True)
    report.write("pieces", "A large batch in pieces", TEXT.format(**vars(args)), tables, None)


TEXT = """
The Llama "{model}" trains in fp32 with AdaLomo on {batch} rows of {length} random tokens per rank
and step: at once, in {pieces} pieces (`batch_splits`), or as {pieces} micro-batches, whose
gradients are kept (`gradient_policy` "sharded"). Without pieces, "checkpointing" is transformers'.
The loss is in chunks (`chunked_loss`) of as many logits as a micro-batch has. Steps take turns in
{rounds} rounds. Ratios are medians, with the minimum and maximum in brackets. CPU seconds are the
sum over all ranks, each with one thread; other processes used the machine too. Peaks are live bytes
of a rank in its second step, without the weights that ZeRO-3 gathers; `plan` computes them from
shapes. At ZeRO-3, DeepSpeed keeps no layer gathered between two uses, as in models that are larger
than its limits.
"""


class Run(NamedTuple):
    """A way to train on a batch."""

    way: str
    model: str
    pieces: int
    rows: int  # of a rank and step
    length: int  # tokens per row
    bucket: int  # elements
    stage: int | None  # None: without DeepSpeed

    @property
    def parts(self) -> int:
        """Micro-batches of a step."""
        return self.pieces if self.way in (ACCUMULATION, CHECKPOINTED) else 1

    @contextlib.contextmanager
    def chunks(self) -> Iterator[None]:
        """A context in which a chunk has as many logits as a micro-batch of accumulation."""
        logits = self.rows // self.pieces * self.length * MODELS[self.model][0]
        with mock.patch.object(chunked_loss, "CHUNK_LOGITS", logits):
            yield

    def step(self) -> Callable[[], None]:
        """Returns a function that makes one step of a new model."""
        torch.manual_seed(0)
        model: Any = llama(MODELS[self.model], torch.float32, CPU)
        model.train()
        if self.way == CHECKPOINTED:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        batch = torch.randint(0, MODELS[self.model][0], (self.rows, self.length))
        parts = batch.chunk(self.parts)
        step = (self._plain if self.stage is None else self._engine)(model, parts)

        def in_chunks() -> None:
            with self.chunks():
                step()

        return in_chunks

    def _plain(self, model: Any, parts: tuple[Tensor, ...]) -> Callable[[], None]:
        if self.way == PIECES:
            ds_ext.split_batch(model, self.pieces)
        ds_ext.chunk_loss(model)
        optimizer = ds_ext.AdaLomo(model.parameters(), lr=1e-5)
        policy = "fused" if self.parts == 1 else "sharded"
        ds_ext.fuse_into_backward(model, optimizer, bucket_size=self.bucket, gradient_policy=policy)

        def step() -> None:
            for part in parts:
                (model(part, labels=part).loss / len(parts)).backward()
            optimizer.step()

        return step

    def _engine(self, model: Any, parts: tuple[Tensor, ...]) -> Callable[[], None]:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": len(parts[0]),
            "gradient_accumulation_steps": len(parts),
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdaLomo", "params": {"lr": 1e-5}},
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": self.bucket,
                **(NOTHING_KEPT if self.stage == 3 else {}),
            },
            "ds_ext": {
                "batch_splits": self.pieces if self.way == PIECES else 1,
                "chunked_loss": True,
            },
        }
        engine = deepspeed.initialize(model=model, config=config)[0]

        def step() -> None:
            for part in parts:
                engine.backward(engine(part, labels=part).loss)
                engine.step()

        return step

    def planned(self, ranks: int) -> float:
        """Returns the bytes of a rank according to ``python -m ds_ext plan``."""
        parser = argparse.ArgumentParser()
        options.add_options(parser)
        given = ["--optimizer", "adalomo", "--dtype", "fp32", "--chunked-loss"]
        given += ["--stage", str(self.stage or 0), "--ranks", str(ranks)]
        given += ["--bucket", str(self.bucket), "--seq", str(self.length)]
        given += ["--batch", str(self.rows // self.parts)]
        given += ["--accumulate"] if self.parts > 1 else []
        given += ["--checkpointing"] if self.way == CHECKPOINTED else []
        given += ["--batch-splits", str(self.pieces)] if self.way == PIECES else []
        with tempfile.TemporaryDirectory() as folder:
            whole = llama(MODELS[self.model], torch.float32, torch.device("meta"))
            whole.config.save_pretrained(folder)
            asked = options.read(parser.parse_args(["--model", folder, *given]))
            plan = MemoryPlan(asked, folder)
            with self.chunks():
                return plan.total(plan.rows[0], asked.batch).total


class Counted(NamedTuple):
    """What a step holds and gathers on a rank."""

    peak: int  # bytes of live tensors, without gathered weights
    gathers: dict[tuple[int, ...], int]  # most gathers of a parameter in a step, by its shape


class WithoutGathers(LiveMemory):
    """Counts live bytes without the weights that ZeRO-3 gathers for computing."""

    def __init__(self) -> None:
        super().__init__(())
        self.is_gathering = False
        self._gathered: set[int] = set()

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self.is_gathering and key not in self.sizes and key not in self._gathered:
            self._gathered.add(key)
            weakref.finalize(storage, self._gathered.discard, key).atexit = False
        if key not in self._gathered:
            super()._see(tensor)


def counted(run: Run) -> Counted:
    """Returns the counts of the second step of a run; a job of ranks, which has no other engine."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import (
        PartitionedParameterCoordinator as Coordinator,
    )

    gathered: Counter[Any] = Counter()
    gather = "_PartitionedParameterCoordinator__all_gather_params"
    fetch, ask = Coordinator.fetch_sub_module, getattr(Coordinator, gather)

    def fetching(*args: Any, **kwargs: Any) -> None:
        watch.is_gathering = True
        fetch(*args, **kwargs)
        watch.is_gathering = False

    def asking(self: Any, params: Any, *args: Any) -> None:
        gathered.update(params)
        ask(self, params, *args)

    with (
        mock.patch.object(Coordinator, "fetch_sub_module", fetching),
        mock.patch.object(Coordinator, gather, asking),
        WithoutGathers() as watch,
    ):
        step = run.step()
        step()
        gc.collect()
        watch.most = watch.now
        gathered.clear()
        step()
    most = torch.tensor(watch.most)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    gathers: dict[tuple[int, ...], int] = {}
    for param, n in gathered.items():
        shape = tuple(param.ds_shape)
        gathers[shape] = max(n, gathers.get(shape, 0))
    return Counted(int(most), gathers)
