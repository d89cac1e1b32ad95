"""``python -m ds_ext config``: prints a DeepSpeed config, like those in the folder configs/."""

import argparse
import json
import sys
from typing import Any

from ds_ext import rates
from ds_ext.config import optimizer_names
from ds_ext.config.parsing import edited
from ds_ext.optimizer import named
from ds_ext.planner import memory, models
from ds_ext.planner.options import BATCH, BUCKET, PlanOptions
from ds_ext.rates import RATES, Rate
from ds_ext.rules import REGISTRY

DESCRIPTION = (
    "Prints a DeepSpeed config of an optimizer, to redirect into a file. With --hf, HF Trainer, "
    'TRL and accelerate replace "auto" by their arguments; with --numbers it is for '
    "deepspeed.initialize."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``config``."""
    names = ", ".join(entry.spelling for entry in REGISTRY.values())
    parser.add_argument("optimizer", metavar="OPTIMIZER", help=f"one of {names}, in any case")
    parser.add_argument("--stage", choices=[*"0123"], default="3", help="ZeRO stage (default 3)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--hf", action="store_true", help='"auto" for HF Trainer (the default)')
    kinds.add_argument("--numbers", action="store_true", help='numbers instead of "auto"')
    what = "with --numbers: a model as for `plan`, whose size chooses the learning rate"
    parser.add_argument("--model", help=f"{what} (default: one of {rates.MODEL} parameters)")


def run(options: argparse.Namespace) -> None:
    """Prints the config, and to stderr whose learning rate it has; ValueError if it cannot."""
    if options.model is not None and not options.numbers:
        raise ValueError("--model chooses a learning rate: add --numbers.")
    parameters = 0
    if options.model is not None:
        skeleton = models.skeleton(models.config(options.model))
        parameters = memory.elements(memory.shapes_of(skeleton))
    made = make(options.optimizer, int(options.stage), options.numbers, parameters)
    print(json.dumps(made, indent=2))
    if options.numbers and (source := rate_source(options.optimizer, parameters)):
        print(source, file=sys.stderr)


def rate_source(optimizer: str, parameters: int) -> str:
    """Returns a sentence about the origin of a config's learning rate; "" if it is a default."""
    kind = named(optimizer, "OPTIMIZER")
    found = rates.for_size(kind.__name__, parameters)
    decay = getattr(kind.hypers(), "weight_decay", 0.0)
    default = f" Weight decay {decay:g} is {kind.__name__}'s default." if decay else ""
    if found is None:
        return ""
    return (
        f"Learning rate {rates.shown(found[0])}: {found[1]}. It is the peak of a schedule with "
        'warm-up, which you add: "scheduler" in the config, such as WarmupCosineLR; --warmup_steps '
        f"and --lr_scheduler_type cosine of HF Trainer.{default}"
    )


def make(optimizer: str, stage: int, numbers: bool = False, parameters: int = 0) -> dict[str, Any]:
    """Returns a DeepSpeed config; ValueError if ds_ext does not have the optimizer.

    Args:
        optimizer: its name, in any case, with or without "ds_ext.".
        stage: the ZeRO stage.
        numbers: whether to write numbers instead of "auto", which HF Trainer fills in: the start
            learning rate of ``ds_ext.rates``, the default weight decay, bf16, no clipping, and one
            sample per step and rank.
        parameters: the number of the model's parameters, which chooses the learning rate.
    """
    kind = named(optimizer, "OPTIMIZER")
    name, hypers = kind.__name__.lower(), kind.hypers()
    lr: Any = getattr(hypers, "lr", None)  # a rule of the user has no entry in RATES
    start, _ = rates.for_size(name, parameters) or (lr, "")
    decay = getattr(hypers, "weight_decay", None)

    def value(number: Any) -> Any:
        return number if numbers else "auto"

    params = {"lr": value(start)} | ({} if decay is None else {"weight_decay": value(decay)})
    params |= RATES.get(name, Rate(lr)).params
    gathers = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    spelling = optimizer_names.in_config(REGISTRY[name].spelling)
    return {
        "optimizer": {"type": spelling, "params": params},
        "zero_optimization": {"stage": stage, **gathers},
        "bf16": {"enabled": value(True)},
        "gradient_clipping": value(0.0),
        "gradient_accumulation_steps": value(1),
        "train_micro_batch_size_per_gpu": value(1),
    }


def of_plan(options: PlanOptions, parameters: int = 0, numbers: bool = True) -> dict[str, Any]:
    """Returns the DeepSpeed config of a plan of one optimizer with a micro-batch; see ``make``."""
    (kind,), (stage,) = options.optimizers, options.stages
    assert stage is not None
    made = make(kind.__name__, stage, numbers, parameters)
    planned = edited(options.config, {BUCKET: options.bucket})
    if not numbers:
        switches = {f"{key}.enabled": "auto" for key in ("bf16", "fp16") if key in planned}
        planned = edited(planned, switches | {BATCH: "auto"})
    made["optimizer"]["params"] |= planned.pop("optimizer")["params"]
    for key, value in planned.items():
        made[key] = made.get(key, {}) | value if isinstance(value, dict) else value
    return made


def trainer_arguments(options: PlanOptions, parameters: int) -> str:
    """Returns the arguments of HF Trainer or TRL that a config with "auto" needs."""
    assert options.batch is not None
    found = rates.for_size(options.optimizers[0].__name__, parameters)
    precision = f" --{options.dtype} True" if options.dtype != "fp32" else ""
    rate = "" if found is None else f" --learning_rate {rates.shown(found[0])}"
    decay = getattr(options.optimizers[0].hypers(**options.params), "weight_decay", 0.0)
    rate += f" --weight_decay {decay:g}" * bool(decay)
    return f"--per_device_train_batch_size {options.batch.rows}{rate}{precision} --max_grad_norm 0"
