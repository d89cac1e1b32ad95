"""``python -m ds_ext plan``: what an optimizer holds on each rank, before a run."""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_ext.backward import settings
from ds_ext.config import offload
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer, named
from ds_ext.planner import memory
from ds_ext.planner.memory import Memory, Shapes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STAGES = {"none": None, "0": 0, "1": 1, "2": 2, "3": 3}
PARTS = ("weights", "state", "gradients", "master")
UNITS = {"GiB": 2**30, "MiB": 2**20}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``plan``."""
    add: Callable[..., Any] = parser.add_argument
    known = ", ".join(memory.KNOWN)
    add("--model", required=True, help=f"HF folder, config.json or Hub name, or one of: {known}")
    add("--ranks", type=_positive, default=1, help="data-parallel ranks (default 1)")
    add("--optimizer", default="all", help=f"one of {', '.join(OPTIMIZERS)}; default: all of them")
    add("--params", default="{}", metavar="JSON", help="optimizer.params of the DeepSpeed config")
    add(
        "--stage",
        choices=STAGES,
        help="one ZeRO stage, or none for a plain step(); default: all of one --optimizer, else 3",
    )
    add("--dtype", choices=DTYPES, default="bf16", help="of weights and gradients (default bf16)")
    size = settings.BUCKET_SIZE
    add("--bucket", type=_positive, default=size, help=f"reduce_bucket_size (default {size})")
    add(
        "--accumulate",
        action="store_true",
        help="with gradient_accumulation_steps > 1, or gradient_policy sharded: gradients are kept",
    )
    add("--offload-param", action="store_true", help="offload_param to the CPU; needs --stage 3")
    add("--offload-optimizer", action="store_true", help="offload_optimizer to the CPU")
    add("--memory", type=_sizes, default=(), metavar="24,48,80", help="GiB of cards to fit into")
    add("--plot", type=Path, metavar="FILE.png", help="also draw the table as stacked bars")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number > 0")
    return int(text)


def _sizes(text: str) -> tuple[float, ...]:
    try:
        sizes = tuple(float(size) for size in text.split(","))
    except ValueError:
        sizes = (0.0,)
    if not all(0 < size < float("inf") for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of GiB such as 24,48,80")
    return sizes


def run(options: argparse.Namespace) -> None:
    """Prints the table and draws it; raises ValueError, naming the option, for what cannot be."""
    model = _model(options.model)
    shapes = memory.shapes_of(model)
    table, n = _rows(model, shapes, options), memory.elements(shapes)
    unit = "GiB" if max(row.total for row in table.values()) >= UNITS["GiB"] else "MiB"
    ranks = f"{options.ranks} data-parallel rank{'s'[: options.ranks > 1]}"
    title = f"{options.model}: {n:,} parameters in {options.dtype} on {ranks}"
    if options.plot:
        _plot(table, options.plot, title, unit)
    print(f"{title}; {unit} per rank\n")
    _print_table(table, n, unit, options.memory)
    live = min(n, 10**9) * DTYPES[options.dtype].itemsize / UNITS[unit]
    print(
        "\nActivations are not counted, nor the weights that ZeRO-3 gathers for computing: up to "
        f"{live:.2f} {unit}\n(stage3_max_live_parameters, 10^9 by default). Gradients are the most "
        f"alive at once, in\nbuckets of {options.bucket:,} elements (--bucket), AdamW's too."
    )
    if options.plot:
        print(f"\nPicture: {options.plot}")


def _optimizers(options: argparse.Namespace) -> list[type[RuleOptimizer]]:
    """Those that ``--optimizer`` names."""
    if options.optimizer.lower() == "all":
        return list(OPTIMIZERS.values())
    return [named(options.optimizer, "--optimizer")]


def _rules(
    optimizer: type[RuleOptimizer], model: nn.Module, options: argparse.Namespace
) -> dict[str, Any]:
    """The rule of each parameter, by name, with the hyper-parameters of ``--params``."""
    try:
        given = json.loads(options.params)
        if not isinstance(given, dict):
            raise ValueError('not an object such as {"lr": 1e-3}')
        return memory.rules_of(optimizer, model, given)
    except ValueError as error:
        raise ValueError(f"--params {options.params}: {error}") from None


def _rows(model: nn.Module, shapes: Shapes, options: argparse.Namespace) -> dict[str, Memory]:
    """Label -> memory: ours, then AdamW at the same ZeRO stages, then Megatron-LM."""
    ranks, dtype, bucket = options.ranks, DTYPES[options.dtype], options.bucket
    stages = _stages(options)
    table = {}
    for optimizer in _optimizers(options):
        rules = _rules(optimizer, model, options)
        offloads = _offloads(rules, options)
        for stage in stages:
            name = f"{optimizer.__name__}, {'plain step()' if stage is None else f'ZeRO-{stage}'}"
            if offloads:
                name += f", {' and '.join(offloads)} offloaded"
            table[name] = memory.ours(
                rules, shapes, stage, ranks, dtype, bucket, options.accumulate, offloads
            )
    for stage in sorted({stage or 0 for stage in stages}):
        adamw = memory.adamw(shapes, stage, ranks, dtype, bucket)
        table[f"AdamW, DeepSpeed ZeRO-{stage}"] = adamw
    pairs = [("bf16", "fp32"), ("fp16", "fp16")] if options.dtype == "bf16" else [("fp32", "fp32")]
    for params, grads in pairs:
        name = f"Megatron-LM, {params}, {grads} gradients"
        table[name] = memory.megatron(shapes, ranks, params, grads)
    return table


def _stages(options: argparse.Namespace) -> list[int | None]:
    """The one asked for; else all of one optimizer, and ZeRO-3 of all."""
    if options.stage:
        return [STAGES[options.stage]]
    if options.optimizer.lower() == "all":
        return [3]
    return [
        stage for stage in STAGES.values() if stage is not None or not options.offload_optimizer
    ]


def _offloads(rules: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """What lies on the host; ValueError where DeepSpeed's setting of that name would be refused."""
    if options.offload_param and options.stage != "3":
        raise ValueError("--offload-param: only ZeRO-3 has it; add --stage 3.")
    if options.offload_optimizer and options.stage == "none":
        raise ValueError("--offload-optimizer: a plain step() has none; choose another --stage.")
    kinds = dict.fromkeys(rules.values())
    has_state = any(offload.has_state(rule, DTYPES[options.dtype]) for rule in kinds)
    if options.offload_optimizer and not has_state and options.optimizer.lower() != "all":
        name = type(next(iter(kinds))).__name__
        raise ValueError(f"--offload-optimizer: {name} has next to no state.")
    wanted = {"param": options.offload_param, "optimizer": options.offload_optimizer and has_state}
    return [name for name, is_on in wanted.items() if is_on]


def _print_table(table: dict[str, Memory], n: int, unit: str, cards: tuple[float, ...]) -> None:
    lines = [["", *PARTS, "total", "bytes/param", *(f"in {card:g} GiB" for card in cards)]]
    for label, row in table.items():
        parts = [getattr(row, part) / UNITS[unit] for part in (*PARTS, "total")]
        fits = ["fits" if row.total <= card * UNITS["GiB"] else "no" for card in cards]
        lines.append([label, *(f"{x:.2f}" for x in parts), f"{row.total / n:.2f}", *fits])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for label, *cells in lines:
        aligned = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        print(f"{label:<{widths[0]}}  " + "  ".join(aligned))


def _model(model: str) -> nn.Module:
    """The model that ``--model`` names, on the device "meta"."""
    if model.lower() in memory.KNOWN:
        return memory.skeleton(memory.llama(*memory.KNOWN[model.lower()]))
    if not os.path.exists(model) and "/" not in model:
        known = ", ".join(memory.KNOWN)
        raise ValueError(f"--model {model}: no such folder or file, and none of {known}.")
    try:
        import transformers
    except ImportError:
        raise ValueError(
            f"--model {model}: reading it needs transformers (pip install ds-ext[hf])."
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--model {model}: no configuration of transformers: {error}") from None
    built: nn.Module
    with torch.device("meta"):
        try:
            built = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:  # not a language model
            built = transformers.AutoModel.from_config(config)
    return built


def _plot(table: dict[str, Memory], path: Path, title: str, unit: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot: needs matplotlib (pip install ds-ext[plot]).") from None
    figure = Figure(figsize=(9, 1.2 + 0.4 * len(table)), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(table)
    for part in PARTS:
        sizes = [getattr(row, part) / UNITS[unit] for row in table.values()]
        axes.barh(list(table), sizes, left=left, label=part)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for i, total in enumerate(left):
        axes.annotate(f"{total:.1f}", (total, i), (3, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set(title=title, xlabel=f"{unit} per rank, without activations")
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # no such folder, or no such format
        raise ValueError(f"--plot {path}: {error}") from None
