"""Peak memory of one fine-tuning step: weights, gradients, optimizer state and activations.

Tensors are counted from allocation to release, on the CPU. This count is exact except for
temporaries inside operators. The second of two steps is measured, because the first one creates the
optimizer's state. Weights and tokens are random.
"""

import argparse
import functools
import gc
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import ds_ext
from benchmarks import report
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.planner import memory as planner
from ds_ext.planner.live_memory import LiveMemory
from ds_ext.planner.memory import elements

transformers.logging.set_verbosity_error()

# Vocabulary, width, inner width, layers, heads, key-value heads, and whether the head is tied.
Sizes = tuple[int, int, int, int, int, int, bool]
LLAMAS: dict[str, Sizes] = {
    "135M": (49152, 576, 1536, 30, 9, 3, True),  # SmolLM2
    "1B": (32000, 2048, 5632, 22, 32, 4, False),  # TinyLlama
    "3B": (32000, 3200, 8640, 26, 32, 32, False),  # OpenLLaMA
    "7B": (32000, 4096, 11008, 32, 32, 32, False),
    "13B": (32000, 5120, 13824, 40, 40, 40, False),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NONE, ADAMW = "none", "AdamW"
OURS = {  # ds_ext optimizers by their names in the table
    f"ds_ext.{cls.__name__}" if cls.__name__ == ADAMW else cls.__name__: cls
    for cls in OPTIMIZERS.values()
}
NAMES = (NONE, ADAMW, *OURS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=LLAMAS, default=["135M"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512], help="tokens per row")
    parser.add_argument("--batch", type=int, default=1, help="rows")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--optimizers", nargs="+", choices=NAMES, default=NAMES)


class Measured(NamedTuple):
    """The result of one run."""

    model: str
    length: int  # tokens per row
    optimizer: str
    peak: int  # bytes


def main(args: argparse.Namespace) -> None:
    """Measures each model, length and optimizer, and writes the tables."""
    rows = []
    for model, length, name in itertools.product(args.models, args.lengths, args.optimizers):
        shape = (args.batch, length)
        peak = measure(LLAMAS[model], shape, name, DTYPES[args.dtype], torch.device("cpu"))
        rows.append(Measured(model, length, name, peak))
        print(*rows[-1], flush=True)
    tables = {"Peak of a step": [shown(row, rows) for row in rows]}
    text = TEXT.format(dtype=args.dtype, batch=args.batch)
    title = "Peak memory of a fine-tuning step"
    report.write("memory", title, text, tables)


TEXT = """
This report shows the peak of live bytes in the second of two training steps of a Llama with random
weights. The training runs in one process without DeepSpeed, with {dtype} weights, batches of
{batch} rows with the number of tokens below, and no activation checkpointing. AdamW is torch's. It
uses `fused=True`, which needs no temporary memory, and `loss.backward(); optimizer.step();
optimizer.zero_grad()`. `none` frees each gradient at once, which is the minimum for any optimizer.
The other optimizers are ds_ext's, used through `fuse_into_backward` with their defaults. Each
parameter has the rule that a config would choose for it. The planned value is the peak of `none`
plus the state according to `python -m ds_ext plan`. If the embedding is also the head (135M), both
parts of its gradient are alive before autograd adds them. GB are 10⁹ bytes.

Each storage is counted from its allocation to its release. Temporary memory inside an operator is
not counted.
"""


def config_keys(sizes: Sizes) -> dict[str, Any]:
    """Returns the arguments of a model's config in transformers."""
    vocab, width, inner, layers, heads, groups, tied = sizes
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "tie_word_embeddings": tied,
        "use_cache": False,
    }


def llama(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Returns a Llama with random weights."""
    config = transformers.LlamaConfig(**config_keys(sizes))
    torch.manual_seed(0)
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def shapes_of(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a Llama's parameters by name."""
    model = llama(sizes, torch.float32, torch.device("meta"))
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def measure(
    sizes: Sizes, shape: tuple[int, int], name: str, dtype: torch.dtype, device: torch.device
) -> int:
    """Returns the peak bytes of the second step on tokens of ``shape``."""
    model = llama(sizes, dtype, device)
    tokens = torch.randint(0, sizes[0], shape, device=device)
    return peak_of_second(fine_tuning(model, name, tokens), model.parameters())


def fine_tuning(model: nn.Module, name: str, tokens: Tensor) -> Callable[[], None]:
    """Returns a function that makes one step of ``model`` with the named optimizer."""
    params = list(model.parameters())
    if name == NONE:
        for param in params:
            param.register_post_accumulate_grad_hook(drop)
        return lambda: model(tokens, labels=tokens).loss.backward()
    if name == ADAMW:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, lr=1e-5, fused=True)
    else:
        optimizer = OURS[name].for_model(model)
        ds_ext.fuse_into_backward(model, optimizer)

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def drop(param: Tensor) -> None:
    """Gradient hook that frees a gradient."""
    param.grad = None


def peak_of_second(step: Callable[[], None], kept: Iterable[Tensor]) -> int:
    """Returns the peak bytes in the second of two steps. ``kept`` exist before it."""
    with LiveMemory(kept) as watch:
        step()
        gc.collect()
        watch.most = watch.now
        step()
    return watch.most


def shown(row: Measured, rows: Sequence[Measured]) -> dict[str, object]:
    """Returns a row of the table, compared with AdamW on the same model and length."""
    n, peak = elements(shapes_of(LLAMAS[row.model])), row.peak
    adamw = next((r.peak for r in rows if r == row._replace(optimizer=ADAMW, peak=r.peak)), None)
    planned = plan(row, rows)
    return {
        "model": row.model,
        "parameters": n,
        "tokens": row.length,
        "optimizer": row.optimizer,
        "peak, bytes": peak,
        "GB": peak / 1e9,
        "bytes per parameter": peak / n,
        "AdamW / this": adamw / peak if adamw else None,
        "peak / planned": peak / planned if planned else None,
    }


def plan(row: Measured, rows: Sequence[Measured]) -> int | None:
    """Returns the planned peak of a ds_ext optimizer: that of ``none``, plus the planned state."""
    none = next((r.peak for r in rows if r == row._replace(optimizer=NONE, peak=r.peak)), None)
    return (
        none + planned_state(LLAMAS[row.model], row.optimizer)
        if none and row.optimizer in OURS
        else None
    )


@functools.cache
def planned_state(sizes: Sizes, name: str) -> int:
    """Returns the state bytes that the planner computes for an optimizer's defaults."""
    whole = llama(sizes, torch.float32, torch.device("meta"))
    rules, shapes = planner.rules_of(OURS[name], whole, {}), planner.shapes_of(whole)
    return planner.optimizer_memory(rules, shapes, None, 1, torch.float32, elements(shapes)).state
