"""Matrices that hold several: fused QKV, gate and up projections, attention heads.

Each section is stepped as a separate matrix, by the part of the rank's run that lies in it. The
state has one number per element of the whole parameter, so it does not depend on the sections.
"""

import itertools
from dataclasses import dataclass
from typing import Any, TypeGuard

from ds_ext.distributed.lockstep import StepGenerator
from ds_ext.hyperparams import Count, Sizes
from ds_ext.ops import sixteen_bit
from ds_ext.ops.expressions import Gradient
from ds_ext.ops.shard import Section, Shard, divided
from ds_ext.ops.sixteen_bit import Weight
from ds_ext.ops.state import Part, State
from ds_ext.optimizer import ema, expert_stacks
from ds_ext.optimizer.ema import GroupRule

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SectionConfig:
    """The hyper-parameters that name the sections of matrices, for rules that step sections."""

    split: Sizes | None = None  # rows of each part
    heads: Count | None = None  # the number of equal parts, in place of `split`


def are_set(rule: object) -> TypeGuard[SectionConfig]:
    """Returns whether a rule's hyper-parameters name sections."""
    return isinstance(rule, SectionConfig) and (rule.split, rule.heads) != (None, None)


def of(rule: object, shape: Shape) -> tuple[Section, ...]:
    """Returns the sections of a matrix that ``refuse`` accepts; () if it is stepped as a whole."""
    if not are_set(rule):
        return ()
    rows, cols = shape
    heads = rule.heads or 1
    sizes = rule.split or (rows // heads,) * heads
    firsts = itertools.accumulate(sizes, initial=0)
    return tuple(Section((n, cols), first * cols) for n, first in zip(sizes, firsts, strict=False))


def refuse(rule: object, shape: Shape, name: str, where: str = "") -> None:
    """Raises ValueError if a rule's sections are not those of a matrix.

    Args:
        rule: the rule of the matrix.
        shape: the shape of the matrix, or of an expert if it stacks experts.
        name: the name of the parameter.
        where: the config's section that has the keys, with a point at its end.
    """
    if not are_set(rule):
        return
    key, shown = ("split", list(rule.split)) if rule.split else ("heads", rule.heads)
    if why := _problem(rule, shape):
        raise ValueError(
            f"{where}{key} is {shown!r}, but {name} has the shape {list(shape)}: {why}."
        )


def _problem(rule: SectionConfig, shape: Shape) -> str:
    """Why a matrix does not have the sections; "" if it has them."""
    if rule.split and rule.heads:
        return f'remove it or "heads", which is {rule.heads}'
    if len(shape) != 2:
        return "only a matrix can be split"
    whole = Shard.whole(shape)
    parts = rule.state_spec(whole) if isinstance(rule, GroupRule) else {}
    odd = [key for key, part in parts.items() if part != Part.like(whole) and key != ema.EMA]
    if odd:
        return (
            f"the state {odd[0]!r} of {type(rule).__name__} does not have one number for each "
            "element, so it cannot be divided. Remove the key, or the option that needs this state"
        )
    if not rule.split:
        return f"heads must divide its {shape[0]} rows" if shape[0] % (rule.heads or 1) else ""
    total = sum(rule.split)
    if total == shape[0]:
        return ""
    return f"the sizes must add up to its {shape[0]} rows, but add up to {total}"


def steps(
    rule: GroupRule, p: Weight, g: Gradient, s: State, t: int, whole: Shard, average: Any
) -> list[StepGenerator]:
    """Returns the generators that step a run: one, or one for each section.

    ``average`` is as ``ema.average`` returns it. A rule that has sections has one number of state
    per element.
    """
    sections = of(rule, whole.shape)
    if not sections:
        return [ema.averaged(rule.step(p, g, s, t, whole), rule, p, average, t, whole)]
    made = []
    for at, shard in divided(sections, whole):
        kept = {key: s[key][at] for key in rule.state_spec(shard) if key != ema.EMA}
        part = sixteen_bit.part(p, at)
        e = None if average is None else sixteen_bit.part(average, at)
        step = rule.step(part, expert_stacks.part(g, at), kept, t, shard)
        made.append(ema.averaged(step, rule, part, e, t, shard))
    return made
