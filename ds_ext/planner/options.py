"""The options of ``plan``, from the command line and from a DeepSpeed config."""

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_ext.backward.gradient_config import GPU_BUCKET_BYTES, GPU_SHARE, gpu_bucket_size
from ds_ext.config import config_checks, parsing
from ds_ext.config.parsing import normalized
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer, named
from ds_ext.planner import models
from ds_ext.planner.activations import MicroBatch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STAGES = {"none": None, "0": 0, "1": 1, "2": 2, "3": 3}
ALL = "all"
# The config key of each option.
KEYS = {
    "stage": "zero_optimization.stage",
    "shard_size": "ds_ext.shard_size",
    "accumulate": "ds_ext.gradient_policy",
    "weight_storage": "ds_ext.weight_storage",
    "dtype": "bf16.enabled",
    "optimizer": "optimizer.type",
    "params": "optimizer.params",
    "offload_param": "zero_optimization.offload_param",
    "offload_optimizer": "zero_optimization.offload_optimizer",
}
# Names that mean DeepSpeed's own optimizers in a config, even if ds_ext has the same name.
DEEPSPEEDS = frozenset("adagrad adam adamw lion muadam muadamw muon musgd".split())


@dataclass(frozen=True)
class PlanOptions:
    """The options of a plan."""

    model: str | None
    ranks: int
    shard_size: int  # ranks per replica; 0 for all
    optimizer: str  # a name, or "all"
    params: Mapping[str, Any]  # optimizer.params
    stage: str | None  # a key of ``STAGES``; None: see ``stages``
    dtype: str
    weight_storage: str | None  # "int8"
    bucket: int  # elements
    chose_bucket: bool  # whether the user gave the size of buckets
    accumulates: str | None  # the gradient_policy, if gradients are kept
    offload_param: bool
    offload_optimizer: bool
    lora: int | None  # rank
    batch: MicroBatch | None
    cards: tuple[float, ...]  # GiB
    picture: Path | None
    hf: bool = False  # --fit writes "auto" for HF Trainer
    has_config: bool = False  # whether --config was given
    of_config: frozenset[str] = frozenset()  # names of options that the config set

    def spelled(self, option: str) -> str:
        """Returns the config key or flag by which the user set an option."""
        if option in self.of_config:
            return f"--config: {KEYS[option]}"
        return "--" + option.replace("_", "-")

    @property
    def optimizers(self) -> list[type[RuleOptimizer]]:
        """The optimizers to plan."""
        if self.optimizer == ALL:
            return list(OPTIMIZERS.values())
        return [named(self.optimizer, self.spelled("optimizer"))]

    @property
    def _is_in_engine(self) -> bool:
        """Whether options exclude a plain ``step()``."""
        return self.offload_optimizer or bool(self.weight_storage)

    @property
    def stages(self) -> list[int | None]:
        """The given stage. By default all stages for one optimizer, and ZeRO-3 for several."""
        if self.stage:
            return [STAGES[self.stage]]
        if self.optimizer == ALL:
            return [3]
        return [s for s in STAGES.values() if s is not None or not self._is_in_engine]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``plan`` to a parser. Most of them default to None."""
    add: Callable[..., Any] = parser.add_argument
    known = ", ".join(models.KNOWN)
    add(
        "--model",
        help=f"HF folder, config.json or Hub name, or one of: {known}; default: the largest of "
        "these that fits (needs --memory)",
    )
    add("--config", type=Path, metavar="ds.json", help="a DeepSpeed config; options overrule it")
    add("--ranks", type=_positive, default=1, help="data-parallel ranks (default 1)")
    add(
        "--shard-size",
        type=_positive,
        metavar="RANKS",
        help="ranks that hold one replica under ZeRO (default: all)",
    )
    add("--optimizer", help=f"one of {', '.join(OPTIMIZERS)}; default: all of them")
    add("--params", metavar="JSON", help="optimizer.params of the DeepSpeed config")
    add(
        "--stage",
        choices=STAGES,
        help="one ZeRO stage, or none for a plain step(); default: all of one --optimizer, else 3",
    )
    add("--dtype", choices=DTYPES, help="of weights and gradients (default bf16)")
    add("--weight-storage", choices=["int8"], help="as ds_ext.weight_storage")
    add("--seq", type=_positive, metavar="TOKENS", help="count activations of rows of this length")
    add("--batch", type=_positive, metavar="ROWS", help="rows a rank computes at once (default 1)")
    add("--checkpointing", action="store_true", help="activation checkpointing of each layer")
    add("--batch-splits", type=_positive, metavar="N", help="as ds_ext.batch_splits")
    add("--chunked-loss", action="store_true", help="as ds_ext.chunked_loss")
    add("--lora", type=_positive, metavar="RANK", help="also LoRA of this rank with AdamW")
    size = f"{GPU_BUCKET_BYTES // 2**20} MiB, at most {GPU_SHARE} of the smallest --memory"
    add("--bucket", type=_positive, help=f"reduce_bucket_size, in elements (default: {size})")
    add(
        "--accumulate",
        nargs="?",
        const="sharded",
        choices=["sharded", "projected"],
        help="keep gradients, by this gradient_policy (default sharded), as for "
        "gradient_accumulation_steps > 1",
    )
    add("--offload-param", action="store_true", help="offload_param to the CPU; needs --stage 3")
    add("--offload-optimizer", action="store_true", help="offload_optimizer to the CPU")
    add("--memory", type=_sizes, default=(), metavar="24,48,80", help="GiB of cards to compare")
    add(
        "--fit",
        type=Path,
        nargs="?",
        const=Path("ds.json"),
        metavar="FILE.json",
        help="print the cheapest steps until the plan fits --memory, and write the config "
        "(default ds.json)",
    )
    add("--hf", action="store_true", help='with --fit: write "auto" for HF Trainer and TRL')
    add("--plot", type=Path, metavar="FILE.png", help="also draw the table as stacked bars")


def read(line: argparse.Namespace) -> PlanOptions:
    """Returns the options of the command line, completed from ``--config``.

    Raises:
        ValueError: the config or ``--params`` cannot be read, or options contradict each other.
    """
    given = {} if line.config is None else _of_config(line.config)

    def is_flag(name: str) -> bool:
        return getattr(line, name, None) not in (None, False)

    def pick(name: str, default: Any) -> Any:
        return getattr(line, name) if is_flag(name) else given.get(name, default)

    if line.model is None and not line.memory:
        raise ValueError("--model is missing; or give --memory to get the largest that fits.")
    if line.hf and line.fit is None:
        raise ValueError("--hf is for the config that --fit writes: add --fit.")
    rows, tokens = pick("batch", None), line.seq
    of_activations = ("batch", "checkpointing", "batch_splits", "chunked_loss")
    if tokens is None and any(map(is_flag, of_activations)):
        names = ", ".join("--" + name.replace("_", "-") for name in of_activations)
        raise ValueError(f"{names} are for activations: add --seq TOKENS.")
    how = line.checkpointing, pick("batch_splits", 1), pick("chunked_loss", False)
    batch = None if tokens is None else MicroBatch(rows or 1, tokens, *how)
    params = given.get("params", {}) if line.params is None else _object(line.params)
    optimizer = pick("optimizer", ALL)
    dtype = pick("dtype", "bf16")
    smallest = min(line.memory, default=math.inf) * 2**30
    options = PlanOptions(
        model=line.model,
        ranks=line.ranks,
        shard_size=pick("shard_size", 0),
        optimizer=ALL if optimizer.lower() == ALL else optimizer,
        params=params,
        stage=pick("stage", None),
        dtype=dtype,
        weight_storage=pick("weight_storage", None),
        bucket=pick("bucket", gpu_bucket_size(DTYPES[dtype].itemsize, smallest)),
        chose_bucket=pick("bucket", None) is not None,
        accumulates=pick("accumulate", None),
        offload_param=pick("offload_param", False),
        offload_optimizer=pick("offload_optimizer", False),
        lora=line.lora,
        batch=batch,
        cards=line.memory,
        picture=line.plot,
        hf=line.hf,
        has_config=line.config is not None,
        of_config=frozenset(name for name in given if not is_flag(name)),
    )
    _check_groups(options)
    if options.offload_param and options.stage != "3":
        raise ValueError(f"{options.spelled('offload_param')}: only ZeRO-3 has it; add --stage 3.")
    if options.offload_optimizer and options.stage == "none":
        raise ValueError(
            f"{options.spelled('offload_optimizer')}: --stage none has none; choose another "
            "--stage."
        )
    return options


def check_storage(options: PlanOptions) -> None:
    """Raises ValueError if ``--weight-storage`` does not support other options."""
    if not options.weight_storage:
        return
    excluded = {
        "stage": options.stage == "none" and options.stage,
        "dtype": options.dtype != "bf16" and options.dtype,
        "params": options.params.get("weight_update", "stochastic") != "stochastic"
        and options.params["weight_update"],
        "offload_param": options.offload_param,
        "offload_optimizer": options.offload_optimizer,
    }
    for option, value in excluded.items():
        if value:
            raise ValueError(
                f"{options.spelled('weight_storage')} {options.weight_storage} does not support "
                f"{options.spelled(option)} {value} yet: remove one of them."
            )


def _check_groups(options: PlanOptions) -> None:
    """Raises ValueError if ``--shard-size`` does not match other options."""
    if not options.shard_size:
        return
    if options.ranks % options.shard_size:
        raise ValueError(
            f"{options.spelled('shard_size')} {options.shard_size} does not divide --ranks "
            f"{options.ranks}: give a divisor, or other --ranks."
        )
    if options.stage in ("none", "0"):
        raise ValueError(
            f"{options.spelled('shard_size')}: {options.spelled('stage')} {options.stage} does not "
            "shard; choose 1 to 3."
        )


def _of_config(path: Path) -> dict[str, Any]:
    """The options that a DeepSpeed config sets. Keys with the value "auto" set none."""
    try:
        given = parsing.load(path)
        config_checks.raise_first(parsing.malformed(given))
        config = normalized(given)
        optimizer, zero = config.get("optimizer", {}), config.get("zero_optimization", {})
        _check_values(config)
        how, own = parsing.gradients(config), parsing.section(config)
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from None
    found = {
        "stage": str(zero.get("stage", 0)),
        "bucket": how.bucket_size,
        "shard_size": own.shard_size,
        "batch_splits": own.batch_splits,
        "chunked_loss": bool(own.chunked_loss),
        "weight_storage": own.weight_storage,
        "accumulate": None if how.policy == "fused" else how.policy,
        "batch": config.get("train_micro_batch_size_per_gpu"),
        "dtype": _dtype(config),
    }
    for name in ("offload_param", "offload_optimizer"):
        found[name] = (zero.get(name) or {}).get("device") == "cpu"
    kind = optimizer.get("type")
    if isinstance(kind, str) and kind.lower() not in DEEPSPEEDS:
        found |= {"optimizer": kind, "params": optimizer.get("params") or {}}
    return {key: value for key, value in found.items() if value is not None}


def _check_values(config: dict[str, Any]) -> None:
    """Raises ValueError for invalid values of keys that only ``plan`` checks."""
    zero = config.get("zero_optimization", {})
    if (stage := zero.get("stage", 0)) not in range(4):
        raise ValueError(f"zero_optimization.stage is {stage!r}; allowed: 0, 1, 2, 3.")
    for key in ("bf16", "fp16"):
        is_on = config.get(key, {}).get("enabled", False)
        if not isinstance(is_on, bool):
            raise ValueError(f"{key}.enabled is {is_on!r}; allowed: true or false.")
    # At stage 3 both offload sections are checked. The option --stage may replace the stage.
    zero3 = {"zero_optimization": zero | {"stage": 3}}
    config_checks.raise_first(config_checks.offload_problems(zero3))


def _dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype of weights in a config; None if a trainer will fill it in."""
    sections = {key: config.get(key) for key in ("bf16", "fp16")}
    for key, section in sections.items():
        if isinstance(section, dict) and section.get("enabled") is True:
            return key
    return None if any(section == {} for section in sections.values()) else "fp32"


def _object(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError('not an object such as {"lr": 1e-3}')
    except ValueError as error:
        raise ValueError(f"--params {text}: {error}") from None
    return given


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
