"""Exponential moving averages (EMA) of the weights, which each step advances.

    e ← e + (1 − ema_decay) · (w − e),  in the first step e ← w

as torch.optim.swa_utils.AveragedModel. The average ``e`` is a part of the state with one number per
element. A weight that is not stepped does not advance its average. If a weight has a master, ``w``
includes it.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.distributed.lockstep import StepGenerator
from ds_ext.hyperparams import Fraction, Precision
from ds_ext.ops import sixteen_bit
from ds_ext.ops.expressions import WeightStorage
from ds_ext.ops.rounding import key, keys
from ds_ext.ops.runs import Runs
from ds_ext.ops.shard import Shard
from ds_ext.ops.sixteen_bit import StochasticWeight
from ds_ext.ops.state import Part, Parts, State
from ds_ext.optimizer import expert_stacks
from ds_ext.rules.base import Rounds, check_spec

EMA = "ema"  # the key of the average in a state
_SEED = 2**40  # added to the seed: the bits differ from those that round weights

Average: TypeAlias = sixteen_bit.Weight | Runs | WeightStorage


@dataclass(frozen=True)
class EmaConfig:
    """The hyper-parameters of the averages, which every optimizer has."""

    ema_decay: Fraction = 0.0  # of the moving average of the weights; 0: no average
    ema_dtype: Precision = "fp32"  # of the average; "bf16" is rounded stochastically

    def state_spec(self, shard: Shard) -> Parts:
        """Returns the state of the rule, and the average."""
        parts = check_spec(type(self), super().state_spec(shard))  # type: ignore[misc]
        if not self.ema_decay:
            return parts
        dtype = torch.bfloat16 if self.ema_dtype == "bf16" else None
        return {**parts, EMA: replace(Part.like(shard), dtype=dtype)}


@dataclass(frozen=True)
class GroupRule(sixteen_bit.RoundingConfig, EmaConfig):
    """The rule of a param group, with the hyper-parameters that every optimizer has.

    The class of the rule is another base of each subclass: see ``param_table.hypers_of``.
    """

    if TYPE_CHECKING:

        def step(self, p: ops.Writable, g: Any, s: State, t: int, shard: Shard) -> Rounds:
            """See ``Rule.step``; ``g`` may also be the rule's own projection of a gradient."""


def average(s: State, rule: GroupRule, number: Any, t: int, first: int = 0) -> Average | None:
    """Returns the average that step ``t`` advances; None if the rule keeps none.

    ``s`` is the state of a parameter, or of a batch with the numbers of its parameters, [n]. The
    random bits of a run count from element ``first``; a batch knows its own.
    """
    if not rule.ema_decay:
        return None
    e: Tensor | Runs = s[EMA]
    if e.dtype != torch.bfloat16:
        return e
    if isinstance(e, Runs):
        return WeightStorage(e, "STOCHASTIC", key=keys(rule.seed + _SEED, number, t))
    return StochasticWeight(e, key(rule.seed + _SEED, number, t), first)


def needs_own_step(rule: GroupRule, dtype: torch.dtype) -> bool:
    """Returns whether no batched pass advances a rule's averages of weights of a dtype.

    A bf16 average reads a weight and its master as one expression, for which tables have no form.
    """
    has_master = (rule.weight_update, dtype) in sixteen_bit.MASTER_DTYPES
    return bool(rule.ema_decay) and rule.ema_dtype == "bf16" and has_master


def averaged(
    step: StepGenerator, rule: GroupRule, p: Any, e: Average | None, t: int, shard: Any
) -> StepGenerator:
    """Yields from a step, then advances the average of the weights.

    ``p`` is the weight that the step writes, in any storage. Without an average ``e``, nothing
    follows.
    """
    yield from step
    if e is None:
        return
    weight = 1.0 if t == 1 else 1 - rule.ema_decay
    if getattr(p, "aux", None) is None and isinstance(p, StochasticWeight | WeightStorage):
        p = p.run  # has all bits of the weight
    if isinstance(e, Tensor | Runs):
        ops.lerp_(e, p, weight, shard)  # type: ignore[arg-type]
    else:  # e ← e − weight · (e − p)
        u = ops.times(p, -1.0)
        ops.apply_(e, u, shard, lr=weight, weight_decay=1.0)  # type: ignore[arg-type]


def start_or_drop(rule: GroupRule, shard: Shard, state: State, p: Tensor) -> None:
    """Follows a change of ``ema_decay`` after the first step.

    A missing average is made of the current weights ``p``, [len(shard)]. One that ``rule`` does not
    keep is removed.
    """
    matrices = [(own, s) for own, _, s in expert_stacks.matrices(shard, state)]
    missing = [(own, s) for own, s in matrices if rule.ema_decay and EMA not in s]
    if missing:
        w = sixteen_bit.values(p, state, Shard.whole((len(p),)))
        dtype = torch.bfloat16 if rule.ema_dtype == "bf16" else ops.accumulator(p.dtype)
        for own, s in missing:
            s[EMA] = w[own].to(p.device, dtype, copy=True)
    elif not rule.ema_decay:
        for _, s in matrices:
            s.pop(EMA, None)
