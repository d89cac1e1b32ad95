"""The options of ``plan``: a DeepSpeed config, and the model and ranks for which it is planned.

The command line changes the config that ``--config`` names. The checks of a run then judge it, so
that ``plan`` refuses what a run refuses, in the same sentences.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ds_ext.backward.gradient_config import GPU_BUCKET_BYTES, GPU_SHARE, gpu_bucket_size
from ds_ext.config import config_checks, optimizer_names, parsing
from ds_ext.config.parsing import edited, lookup
from ds_ext.errors import raise_all
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer, named
from ds_ext.planner import memory, models
from ds_ext.planner.activations import MicroBatch
from ds_ext.settings import SIZES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STAGES = {"none": None, "0": 0, "1": 1, "2": 2, "3": 3}
ALL = "all"  # optimizers, or stages
# Keys of a config. Each option that sets one has it as its name in the parsed command line.
STAGE = "zero_optimization.stage"
BUCKET = "zero_optimization.reduce_bucket_size"
PERSIST = "zero_optimization.stage3_param_persistence_threshold"
OFFLOADS = {what: f"zero_optimization.offload_{what}.device" for what in ("param", "optimizer")}
BATCH = SIZES[1]
SPLITS, CHUNKED_LOSS = "ds_ext.batch_splits", "ds_ext.chunked_loss"
WEIGHT_STORAGE = "ds_ext.weight_storage"
OF_ACTIVATIONS = {BATCH, "checkpointing", SPLITS, CHUNKED_LOSS}


@dataclass
class PlanOptions:
    """The options of a plan. ValueError if a run would refuse the config."""

    model: str
    # See ``parsing.normalized``. Its optimizer's type may be ``ALL``; its stage may be missing, for
    # all stages, or None, for a plain ``step()``.
    config: dict[str, Any]
    ranks: int = 1
    tokens: int | None = None  # of a row; None: activations are not counted
    checkpointing: bool = False
    cards: tuple[float, ...] = ()  # GiB
    picture: Path | None = None
    file: Path | None = None  # --config

    def __post_init__(self) -> None:
        try:
            self._read()
            self._check()
            policy = parsing.gradients(self.config).policy
        except ValueError as error:
            raise ValueError(f"--config {self.file}: {error}" if self.file else error) from None
        self.accumulates = policy == "sharded"  # whether gradients are kept

    def _read(self) -> None:
        """Reads what ``config`` says."""
        config, kind = self.config, self.config["optimizer"]
        self.own = parsing.section(config)  # the section "ds_ext"
        self.has_all_optimizers = kind["type"] == ALL
        self.optimizers: list[type[RuleOptimizer]] = [*OPTIMIZERS.values()]
        if not self.has_all_optimizers:
            self.optimizers = [named(kind["type"])]
        self.params: dict[str, Any] = kind.get("params") or {}  # optimizer.params
        # "param" and "optimizer", if they are on the CPU.
        self.offloads = [what for what, key in OFFLOADS.items() if config_checks.is_on(config, key)]
        # Whether a plain ``step()`` cannot do it.
        self.needs_engine = "optimizer" in self.offloads or bool(self.own.weight_storage)
        self.stages = self._stages()
        on = [key for key in ("bf16", "fp16") if lookup(config, f"{key}.enabled")]
        self.dtype = on[0] if on else "fp32"  # of weights and gradients
        # By default the bucket of a GPU with the memory of the smallest card.
        smallest = min(self.cards, default=float("inf")) * 2**30
        default = gpu_bucket_size(DTYPES[self.dtype].itemsize, smallest)
        self.bucket = int(lookup(config, BUCKET) or default)
        self.persist = int(lookup(config, PERSIST, memory.PERSIST))
        self.batch = None  # of a rank; None: activations are not counted
        if self.tokens is not None:
            how = self.checkpointing, self.own.batch_splits, bool(self.own.chunked_loss)
            self.batch = MicroBatch(lookup(config, BATCH) or 1, self.tokens, *how)

    def _stages(self) -> list[int | None]:
        """The config's stage. By default all stages for one optimizer, and ZeRO-3 for several."""
        stage = lookup(self.config, STAGE, ALL)
        if stage != ALL:
            return [stage]
        if self.has_all_optimizers or "param" in self.offloads:
            return [3]
        return [s for s in STAGES.values() if s is not None or not self.needs_engine]

    def _check(self) -> None:
        """Raises ValueError for what a run refuses."""
        stage = self.stages[-1]  # the highest
        config = edited(self.config, {STAGE: stage or 0})
        if self.has_all_optimizers and self.own.weight_storage:  # excludes params of any optimizer
            config["optimizer"] = {"type": "AdaLomo", "params": self.params}
        elif self.has_all_optimizers:
            del config["optimizer"]
        if stage is None and self.needs_engine:
            what = "no int8 weights and no offload"
            raise ValueError(f"--stage none has {what}: choose another --stage.")
        if self.own.weight_storage and self.dtype == "fp32":
            raise ValueError("--weight-storage int8 needs 16-bit weights: remove --dtype fp32.")
        raise_all(config_checks.read(config).problems)
        raise_all(config_checks.size_problems(config, self.ranks))

    def edited(self, changes: Mapping[str, Any]) -> "PlanOptions":
        """Returns options with other values of dotted keys of the config."""
        return replace(self, config=edited(self.config, changes))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``plan`` to a parser. Most of them default to None."""
    add: Callable[..., Any] = parser.add_argument
    known = ", ".join(models.KNOWN)
    # ``read`` requires it: argparse would not name a misspelled --model.
    add("--model", help=f"required: HF folder, config.json or Hub name, or one of: {known}")
    add("--config", type=Path, metavar="ds.json", help="a DeepSpeed config; options overrule it")
    add("--ranks", type=positive, default=1, help="data-parallel ranks (default 1)")
    add("--optimizer", help=f"one of {', '.join(OPTIMIZERS)}; default: all of them")
    add("--params", metavar="JSON", help="optimizer.params of the DeepSpeed config")
    what = "one ZeRO stage, or none for a plain step(); default: all of one --optimizer, else 3"
    add("--stage", dest=STAGE, choices=STAGES, help=what)
    add("--dtype", choices=DTYPES, help="of weights and gradients (default bf16)")
    add("--weight-storage", dest=WEIGHT_STORAGE, choices=["int8"], help=f"as {WEIGHT_STORAGE}")
    add("--seq", type=positive, metavar="TOKENS", help="count activations of rows of this length")
    rows = {"dest": BATCH, "type": positive, "metavar": "ROWS"}
    add("--batch", **rows, help="rows a rank computes at once (default 1)")
    add("--checkpointing", action="store_true", help="activation checkpointing of each layer")
    add("--batch-splits", dest=SPLITS, type=positive, metavar="N", help=f"as {SPLITS}")
    add("--chunked-loss", dest=CHUNKED_LOSS, action="store_true", help=f"as {CHUNKED_LOSS}")
    size = f"{GPU_BUCKET_BYTES // 2**20} MiB, at most {GPU_SHARE} of the smallest --memory"
    elements = {"dest": BUCKET, "type": positive, "metavar": "BUCKET"}
    add("--bucket", **elements, help=f"reduce_bucket_size, in elements (default: {size})")
    kept = {"dest": "ds_ext.gradient_policy", "action": "store_const", "const": "sharded"}
    add("--accumulate", **kept, help="keep gradients, as gradient_accumulation_steps > 1 does")
    to_cpu = {"action": "store_const", "const": "cpu"}
    param, optimizer = OFFLOADS.values()
    add("--offload-param", dest=param, **to_cpu, help="offload_param to the CPU; needs ZeRO-3")
    add("--offload-optimizer", dest=optimizer, **to_cpu, help="offload_optimizer to the CPU")
    add("--memory", type=_sizes, default=(), metavar="24,48,80", help="GiB of cards to compare")
    what = "print the cheapest steps until the plan fits --memory, and write the config "
    written = {"type": Path, "nargs": "?", "const": Path("ds.json"), "metavar": "FILE.json"}
    add("--fit", **written, help=what + "(default ds.json)")
    add("--hf", action="store_true", help='with --fit: write "auto" for HF Trainer and TRL')
    add("--plot", type=Path, metavar="FILE.png", help="also draw the table as stacked bars")


def read(line: argparse.Namespace, file: dict[str, Any] | None = None) -> PlanOptions:
    """Returns the options of the command line, completed from the config of ``--config``.

    ValueError if ``--params`` cannot be read, or if a run would refuse the changed config.
    """
    if line.model is None:
        what = "a folder, a Hub name, or a name that --help lists"
        raise ValueError(f"--model is missing: give {what}.")
    if line.hf and line.fit is None:
        raise ValueError("--hf is for the config that --fit writes: add --fit.")
    given = {name: value for name, value in vars(line).items() if value not in (None, False)}
    if line.seq is None and not given.keys().isdisjoint(OF_ACTIVATIONS):
        raise ValueError(
            "--batch, --checkpointing, --batch-splits and --chunked-loss are for activations: add "
            "--seq TOKENS."
        )
    config = {"bf16": {"enabled": True}} if file is None else _planned(file)
    changes = {key: value for key, value in given.items() if "." in key or key == BATCH}
    if STAGE in changes:
        changes[STAGE] = STAGES[changes[STAGE]]
    if line.dtype is not None:
        sections = {"bf16", line.dtype, *config} & {"bf16", "fp16"}
        changes |= {f"{section}.enabled": section == line.dtype for section in sections}
    kind = config.get("optimizer", {"type": ALL, "params": {}})
    if line.optimizer is not None and line.optimizer.lower() == ALL:
        kind = kind | {"type": ALL}
    elif line.optimizer is not None:
        one = named(line.optimizer, "--optimizer").__name__
        kind = kind | {"type": optimizer_names.in_config(one)}
    if line.params is not None:
        kind = kind | {"params": parsing.parsed(line.params, f"--params {line.params}")}
    return PlanOptions(
        model=line.model,
        config=edited(config, changes | {"optimizer": kind}),
        ranks=line.ranks,
        tokens=line.seq,
        checkpointing=line.checkpointing,
        cards=line.memory,
        picture=line.plot,
        file=line.config,
    )


def _planned(file: dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed config with a dtype and a stage, and without an optimizer of DeepSpeed."""
    config = parsing.normalized(file)
    if optimizer_names.registry_key(lookup(config, "optimizer.type")) is None:
        config.pop("optimizer", None)
    sections = [config.get(key) for key in ("bf16", "fp16")]
    if {} in sections and not any(section and section.get("enabled") for section in sections):
        config = edited(config, {"bf16.enabled": True})  # a trainer will fill in "auto"
    return edited(config, {STAGE: lookup(config, STAGE) or 0})


def positive(text: str) -> int:
    """Returns the number > 0 that an option's ``text`` means."""
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
