"""``python -m ds_ext config``: prints a DeepSpeed config, like those in the folder configs/."""

import argparse
import json
from typing import Any

from ds_ext.optimizer import named
from ds_ext.planner.options import DEEPSPEEDS, PlanOptions
from ds_ext.rates import RATES, Rate
from ds_ext.rules import REGISTRY

HELP = "print a DeepSpeed config of an optimizer"
DESCRIPTION = (
    "Prints a DeepSpeed config, to redirect into a file. With --hf, HF Trainer, TRL and accelerate "
    'replace "auto" by their arguments; with --numbers it is for deepspeed.initialize.'
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``config``."""
    names = ", ".join(entry.spelling for entry in REGISTRY.values())
    parser.add_argument("optimizer", metavar="OPTIMIZER", help=f"one of {names}, in any case")
    stages = ("0", "1", "2", "3")
    parser.add_argument("--stage", choices=stages, default="3", help="ZeRO stage (default 3)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--hf", action="store_true", help='"auto" for HF Trainer (the default)')
    kinds.add_argument("--numbers", action="store_true", help='numbers instead of "auto"')


def run(options: argparse.Namespace) -> None:
    """Prints the config; raises ValueError for an unknown optimizer."""
    print(as_text(make(options.optimizer, int(options.stage), options.numbers)), end="")


def make(optimizer: str, stage: int, numbers: bool = False) -> dict[str, Any]:
    """Returns a DeepSpeed config.

    Args:
        optimizer: its name, in any case, with or without "ds_ext.".
        stage: the ZeRO stage.
        numbers: whether to write numbers instead of "auto", which HF Trainer fills in: the start
            learning rate of ``ds_ext.rates``, the default weight decay, bf16, no clipping, and one
            sample per step and rank.

    Raises:
        ValueError: ds_ext does not have the optimizer.
    """
    kind = named(optimizer, "OPTIMIZER")
    name = kind.__name__.lower()
    spelling = REGISTRY[name].spelling
    hypers = kind.hypers()
    lr: Any = getattr(hypers, "lr", None)  # a rule of the user has no entry in RATES
    rate = RATES.get(name, Rate(lr))

    def value(number: Any) -> Any:
        return number if numbers else "auto"

    decay = getattr(hypers, "weight_decay", None)
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "optimizer": {
            "type": f"ds_ext.{spelling}" if name in DEEPSPEEDS else spelling,
            "params": {
                "lr": value(rate.start),
                **({"weight_decay": value(decay)} if decay is not None else {}),
                **rate.params,
            },
        },
        "zero_optimization": zero,
        "bf16": {"enabled": value(True)},
        "gradient_clipping": value(0.0),
        "gradient_accumulation_steps": value(1),
        "train_micro_batch_size_per_gpu": value(1),
    }


def of_plan(asked: PlanOptions) -> dict[str, Any]:
    """Returns the DeepSpeed config, with numbers, of a plan of one optimizer with a micro-batch."""
    assert asked.stage is not None and asked.batch is not None
    config = make(asked.optimizer, int(asked.stage), numbers=True)
    config["optimizer"]["params"] |= asked.params
    config["bf16"]["enabled"] = asked.dtype == "bf16"
    if asked.dtype == "fp16":
        config["fp16"] = {"enabled": True}
    config["train_micro_batch_size_per_gpu"] = asked.batch.rows
    zero = config["zero_optimization"]
    zero["reduce_bucket_size"] = asked.bucket
    if asked.offload_param:
        zero["offload_param"] = {"device": "cpu"}
    if asked.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    own = {
        "gradient_policy": asked.accumulates,
        "shard_size": asked.shard_size,
        "batch_splits": asked.batch.splits if asked.batch.splits > 1 else None,
        "chunked_loss": asked.batch.chunked_loss,
        "weight_storage": asked.weight_storage,
    }
    if own := {key: value for key, value in own.items() if value}:
        config["ds_ext"] = own
    return config


def as_text(config: dict[str, Any]) -> str:
    """Returns a config as the text of a JSON file."""
    return json.dumps(config, indent=2) + "\n"
