"""Log messages when training begins: how the model is stepped, and warnings.

The updates of AdaLomo, LAMB and Adafactor are in proportion to the weights. These rules are
registered with ``relative``. A learning rate for AdamW is too small for them, and a matrix that
starts at zero, such as LoRA's ``lora_B``, hardly learns. Vectors of zeros (biases) are normal.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ds_ext import rates
from ds_ext.backward.gradient_config import GradientConfig
from ds_ext.distributed.layout import Layout
from ds_ext.ops import int8, sixteen_bit, state
from ds_ext.optimizer import RuleOptimizer, param_checks
from ds_ext.optimizer.model_view import at_zero

LEAST_RATE = 1e-4  # relative to the weights: a tenth of the default of such rules


def line(optimizer: RuleOptimizer, layout: Layout, grad_config: GradientConfig, where: str) -> str:
    """Returns a line that says how a model is stepped, ``where`` such as "ZeRO stage 3"."""
    trained = [p for p in optimizer.group_of if p.requires_grad]
    kinds = dict.fromkeys(optimizer.hypers_of(optimizer.group_of[p]).__name__ for p in trained)
    elements = sum(math.prod(layout.shards[p].shape) for p in trained)
    ranks = f"{layout.world} rank{'s' * (layout.world > 1)}"
    writing = ", ".join(dict.fromkeys(_writing(optimizer, p) for p in trained))
    return (
        f"{' and '.join(kinds) or type(optimizer).__name__}, {where}, {ranks}: {elements:,} "
        f'parameters trained, gradient_policy "{grad_config.policy}", weights {writing or "none"}, '
        f"{state_bytes(optimizer, layout) / 2**20:,.2f} MiB of state on this rank"
    )


def _writing(optimizer: RuleOptimizer, param: Tensor) -> str:
    """A weight's dtype, and how it is rounded if it has 16 bits: 'bfloat16 ("stochastic")'."""
    dtype = "int8" if int8.find(param) else str(param.dtype).removeprefix("torch.")
    rounding = optimizer.rule_of(param).weight_update
    return f'{dtype} ("{rounding}")' if param.dtype.itemsize == 2 else dtype


def state_bytes(optimizer: RuleOptimizer, layout: Layout) -> int:
    """Returns the bytes of state, including masters, of trained parameters on this rank."""
    total = 0
    for param in (p for p in optimizer.group_of if p.requires_grad):
        rule, shard = optimizer.rule_of(param), layout.shards[param]
        run = torch.empty(len(shard), dtype=param.dtype, device="meta")
        total += state.nbytes(state.zeros(optimizer.state_spec(param, shard, rule), run))
        total += state.nbytes(sixteen_bit.master(run, rule))
    return total


def warnings(optimizer: RuleOptimizer, layout: Layout, is_config: bool = True) -> Iterator[str]:
    """Yields warnings about parameters that will hardly learn from their initial weights.

    All ranks of the model call it. ``is_config`` says whether a DeepSpeed config has set it up.
    """
    yield from unusual_rates(optimizer, is_config)
    if not is_config:
        yield from param_checks.stepped_alike(optimizer)
    relative = [p for p in optimizer.group_of if p.requires_grad and optimizer.is_relative(p)]
    matrices = [p for p in relative if len(layout.shards[p].shape) > 1]
    if zeros := _zeros(matrices, layout):
        names = [layout.name(p) for p in zeros]
        yield at_zero(type(optimizer.rule_of(zeros[0])).__name__, names, is_config)


def unusual_rates(optimizer: RuleOptimizer, is_config: bool = True) -> Iterator[str]:
    """Yields a warning for each rule whose learning rate is far too small or large."""
    auto = (
        ' Where the config says "auto" it is learning_rate of TrainingArguments, by default 5e-5.'
    )
    trained = [p for p in optimizer.group_of if p.requires_grad]
    for rule, lr, is_relative in dict.fromkeys(_rate(optimizer, p) for p in trained):
        if lr is None:
            continue
        if lr > rates.largest_usual(rule):
            yield f"lr = {lr:g} is large for {rule}: {rates.advice(rule)}."
        if is_relative and 0 < lr < LEAST_RATE:
            yield (
                f"lr = {lr:g} is small for {rule}, whose lr is relative to the weights: "
                f"{rates.advice(rule) or 'try larger ones'}.{auto * is_config}"
            )


def _rate(optimizer: RuleOptimizer, param: Tensor) -> tuple[str, Any, bool]:
    """A parameter's rule, its learning rate before any schedule, and ``is_relative``."""
    group, rule = optimizer.group_of[param], optimizer.rule_of(param)
    lr = group.get("initial_lr", group["lr"])
    return type(rule).__name__, lr, optimizer.is_relative(param)


def _zeros(params: list[Tensor], layout: Layout) -> list[Tensor]:
    """The parameters that are zero on all ranks; all ranks call it."""
    own = torch.zeros(len(layout.weights), dtype=torch.float32, device=layout.device)
    for param in params:
        with int8.expanded([param]):
            run = layout.run(param)
            # Of most runs, the first elements show it.
            own[layout.index_of[param]] = float(run[:1024].any() or run.any())
    total = layout.total(own).tolist()
    layout.take_bytes_sent()  # so that the first step does not count them
    return [p for p in params if not total[layout.index_of[p]]]
