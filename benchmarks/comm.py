"""Counts bytes and calls of collectives in a step of ds_ext's AdaLomo and of its authors'.

Real ranks (gloo, CPU) train a small Llama. Each process-group call is recorded with the package
that made it. This separates DeepSpeed's gathers of weights from the optimizer's collectives. The
bytes sent are those of ring algorithms: with d ranks, each rank sends 2(d-1)/d of the bytes of an
all-reduce and (d-1)/d of the bytes of any other collective.
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import lomo_optim
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_ext
from benchmarks import report
from benchmarks.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Call, noted, sent
from benchmarks.memory import LLAMAS, Sizes, llama
from benchmarks.ranks import on_ranks
from ds_ext.distributed.placement import Sharded

MODELS: dict[str, Sizes] = {"small": (2048, 256, 688, 4, 4, 4, False), "135M": LLAMAS["135M"]}
LR = 5e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--length", type=int, default=32, help="tokens per rank")
    parser.add_argument("--bucket", type=int, default=2**20, help="reduce_bucket_size in elements")


class Step(NamedTuple):
    """The collectives of one rank in one step."""

    calls: list[Call]
    gradients: int  # bytes of all gradients in the dtype of their reduction
    rounds: list[int]  # the rounds of each bucket; empty for upstream


@mock.patch.object(Sharded, "_begin_sum", Sharded._scatter)  # as on GPUs; forks inherit it
def main(args: argparse.Namespace) -> None:
    """Counts the steps of all runs, and writes the tables."""
    runs = {"upstream, ZeRO-3": upstream, "ds_ext, ZeRO-3": stage3, "ds_ext, ZeRO-2": stage2}
    steps = {
        (model, name): on_ranks(args.ranks, counted, job, MODELS[model], args.length, args.bucket)
        for model in args.models
        for name, job in runs.items()
    }
    rows = [
        {"model": model, "run": name} | figures(step, steps[model, "upstream, ZeRO-3"], args.ranks)
        for (model, name), step in steps.items()
    ]
    muons = [
        {"Muon of": owner, "ZeRO stage": stage}
        | on_ranks(args.ranks, muon, owner, stage, args.bucket)
        for stage in (2, 3)
        for owner in ("deepspeed", "ds_ext")
    ]
    text = TEXT.format(ranks=args.ranks, length=args.length, bucket=args.bucket)
    title = "Bytes and calls of collectives in a step"
    report.write("comm", title, text, {"A step": rows, "Muon": muons})


TEXT = """
This report counts the second step of AdaLomo on {ranks} real ranks (gloo). They train Llamas with
random fp32 weights, each rank on {length} random tokens; `reduce_bucket_size` is {bucket:,}
elements. Each call of a process group is counted when torch passes it to the backend. A call
belongs to the optimizer if ds_ext or lomo_optim made it. DeepSpeed's gathers of weights are not
included. Gradients are reduce-scattered as on GPUs; gloo would all-reduce them. "Sent" is the
number of bytes that a rank sends in a ring: 2(d-1)/d of the bytes of an all-reduce, and (d-1)/d of
the bytes of other collectives. "Other than gradients" is everything that the optimizer sends except
gradients, including the padding of gradients. For ZeRO-2 it does not include the updated weights,
which any optimizer has to gather there (upstream has no ZeRO-2).

Upstream is `lomo_optim.AdaLomo` with its ZeRO-3 code. This code reads an attribute `dp_rank` that
nothing in the package sets, so the benchmark sets it to the rank. `Tensor.cuda` does nothing.
Upstream all-reduces each whole gradient. It runs on modules that DeepSpeed has partitioned, but
without DeepSpeed's engine, which refuses `loss.backward()` without an optimizer. Nothing gathers
the embedding again after its step, while DeepSpeed's optimizers and ds_ext do this. Upstream
therefore sends fewer bytes in all-gathers.

The second table trains the small model in bf16 by DeepSpeed's Muon and by ds_ext's, 32 steps on the
same tokens. It counts all collectives of a step, DeepSpeed's gathers of weights among them, and the
bytes of all tensors that a rank keeps after backward and after the step.
"""


# The runs. Each returns a function that makes one step on a row of tokens, on one rank.


def stage3(sizes: Sizes, bucket: int) -> tuple[Callable[[Tensor], None], Step]:
    return ours(sizes, bucket, stage=3)


def stage2(sizes: Sizes, bucket: int) -> tuple[Callable[[Tensor], None], Step]:
    return ours(sizes, bucket, stage=2)


def ours(sizes: Sizes, bucket: int, stage: int) -> tuple[Callable[[Tensor], None], Step]:
    """Returns a step of ds_ext's AdaLomo under DeepSpeed, and a ``Step`` that records rounds."""
    zero = {"stage": stage, "reduce_bucket_size": bucket}
    optimizer = {"type": "AdaLomo", "params": {"lr": LR}}
    engine, gradients = engine_of(sizes, {"zero_optimization": zero, "optimizer": optimizer})
    found = Step([], gradients, [])
    update = ds_ext.AdaLomo.update

    def noting(*args: Any) -> int:
        found.rounds.append(update(*args))
        return found.rounds[-1]

    ds_ext.AdaLomo.update = noting  # type: ignore[method-assign]

    def step(tokens: Tensor) -> None:
        engine.backward(engine(tokens, labels=tokens).loss)
        engine.step()

    return step, found


def upstream(sizes: Sizes, bucket: int) -> tuple[Callable[[Tensor], None], Step]:
    """Returns a step of the authors' AdaLomo on ZeRO-3 partitions. It has no buckets."""
    engine, gradients = engine_of(sizes, {"zero_optimization": {"stage": 3}})
    enabled = mock.patch("lomo_optim.adalomo.is_deepspeed_zero3_enabled", lambda: True)
    with enabled, mock.patch.object(Tensor, "cuda", lambda self: self):
        optimizer = lomo_optim.AdaLomo(engine.module, lr=LR, loss_scale=None)
    optimizer.dp_rank = dist.get_rank()

    def step(tokens: Tensor) -> None:
        loss = engine.module(tokens, labels=tokens).loss
        optimizer.fused_backward(loss, LR)

    return step, Step([], gradients, [])


def engine_of(sizes: Sizes, config: dict[str, Any]) -> tuple[Any, int]:
    """Returns a DeepSpeed engine of an fp32 Llama, and the bytes of all its gradients."""
    model = llama(sizes, torch.float32, torch.device("cpu"))
    gradients = sum(p.nbytes for p in model.parameters())
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine, gradients


def muon(owner: str, stage: int, bucket: int) -> dict[str, object]:
    """Trains a Llama by the Muon of ``owner``; returns this rank's row of the second table."""
    params: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.0}
    if owner == "deepspeed":
        params |= {"adam_lr": 1e-3}
    else:
        params |= {"others": {"type": "AdamW", "lr": 1e-3}}
    zero = {"stage": stage, "reduce_bucket_size": bucket}
    zero["reduce_scatter"] = owner != "deepspeed"  # whose Muon refuses it at stage 3
    kind = "Muon" if owner == "deepspeed" else "ds_ext.Muon"
    torch.manual_seed(0)
    config = {"bf16": {"enabled": True}, "zero_optimization": zero}
    engine, _ = engine_of(MODELS["small"], config | {"optimizer": {"type": kind, "params": params}})
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = torch.randint(0, 512, (4, 1, 128), generator=generator)
    losses = []
    for step in range(32):
        tokens = batches[step % len(batches)]
        with noted() as calls:
            loss = engine(tokens, labels=tokens).loss
            engine.backward(loss)
            after_backward = kept_bytes()
            engine.step()
        losses.append(loss.item())
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    total = sum(sent(call.kind, call.nbytes, dist.get_world_size()) for call in calls)
    return {
        "sent, bytes per parameter": total / numel,
        "calls": len(calls),
        "kept after backward, bytes per parameter": after_backward / numel,
        "kept after the step": kept_bytes() / numel,
        "loss, mean of the last four steps": statistics.mean(losses[-4:]),
    }


def kept_bytes() -> int:
    """Returns the bytes of all tensors of this process."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    storages = [x.untyped_storage() for x in tensors if x.device.type == "cpu"]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


# Ranks.


def counted(job: Callable[..., Any], sizes: Sizes, length: int, bucket: int) -> Step:
    """Returns the collectives of this rank in the second step of ``job``."""
    step, found = job(sizes, bucket)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, sizes[0], (1, length), generator=generator)
    step(tokens)  # in the first step, ZeRO-3 records the order of modules
    found.rounds.clear()
    with noted() as calls:
        step(tokens)
    return found._replace(calls=calls)


# Tables.


def figures(step: Step, reference: Step, ranks: int) -> dict[str, object]:
    """Returns a row of the first table. ``reference`` is upstream's step of the same model."""
    calls = optimizers(step.calls)
    gathering = [call for call in calls if call.kind == ALL_GATHER]
    total = sum(sent(call.kind, call.nbytes, ranks) for call in calls)
    weights = sum(sent(call.kind, call.nbytes, ranks) for call in gathering)
    is_upstream = not step.rounds
    gradients = sent(ALL_REDUCE if is_upstream else REDUCE_SCATTER, step.gradients, ranks)
    theirs = sum(sent(call.kind, call.nbytes, ranks) for call in optimizers(reference.calls))
    buckets = len(step.rounds)
    return {
        "sent by the optimizer, bytes": round(total),
        "/ upstream": total / theirs,
        "without weights / upstream": (total - weights) / theirs,
        "other than gradients / gradients": (total - weights - gradients) / gradients,
        "calls": len(calls),
        "buckets": buckets or None,
        "rounds of a bucket": max(step.rounds, default=None),
        "calls per bucket": len(calls) / buckets if buckets else None,
    }


def optimizers(calls: Iterable[Call]) -> list[Call]:
    """Returns the calls that are not DeepSpeed's gathers of weights."""
    return [call for call in calls if call.caller != "deepspeed"]
