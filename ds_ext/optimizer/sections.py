"""Matrices that hold several: fused QKV, gate and up projections, attention heads.

Each section is stepped as a separate matrix, by the part of the rank's run that lies in it. The
state has one number per element of the whole parameter, so it does not depend on the sections.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ds_ext.distributed.lockstep import StepGenerator
from ds_ext.hyperparams import Count, Dim, Sizes
from ds_ext.ops import sixteen_bit
from ds_ext.ops.expressions import Gradient
from ds_ext.ops.shard import Section, Shard, StridedRange
from ds_ext.ops.sixteen_bit import Weight
from ds_ext.ops.state import Part, State
from ds_ext.optimizer import ema, expert_stacks
from ds_ext.optimizer.ema import GroupRule

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SectionConfig:
    """The hyper-parameters that name the sections of matrices, for rules that step sections."""

    split: Sizes | None = None  # rows of each part
    heads: Count | None = None  # each head is a part; with `split`, its sizes are of one head
    split_dim: Dim = 0  # 1: columns instead of rows


_UNSET = (None, None, 0)


def are_set(rule: object) -> TypeGuard[SectionConfig]:
    """Returns whether a rule's hyper-parameters name sections."""
    return isinstance(rule, SectionConfig) and (rule.split, rule.heads, rule.split_dim) != _UNSET


def of(rule: object, shape: Shape) -> tuple[Section, ...]:
    """Returns the sections of a matrix that ``refuse`` accepts; () if it is stepped as a whole."""
    if not are_set(rule):
        return ()
    sizes, heads, dim = rule.split, rule.heads or 1, rule.split_dim
    if sizes is None:
        sizes, heads = (shape[dim] // heads,) * heads, 1
    unit = shape[1] if dim == 0 else 1
    found, first = [], 0
    for size in sizes:
        own = (size * heads, shape[1]) if dim == 0 else (shape[0], size * heads)
        found.append(Section(own, first * unit, size * unit, sum(sizes) * unit))
        first += size
    return tuple(found)


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
    key = "split" if rule.split else "heads" if rule.heads else "split_dim"
    given = {"split": rule.split, "heads": rule.heads, "split_dim": rule.split_dim}[key]
    shown = list(given) if isinstance(given, tuple) else given
    if why := _problem(rule, shape):
        raise ValueError(
            f"{where}{key} is {shown!r}, but {name} has the shape {list(shape)}: {why}."
        )


def _problem(rule: SectionConfig, shape: Shape) -> str:
    """Why a matrix does not have the sections; "" if it has them."""
    if not rule.split and not rule.heads:
        return 'set "split" or "heads" too, or remove the key'
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
    rows = "rows" if rule.split_dim == 0 else "columns"
    size = shape[rule.split_dim]
    if not rule.split:
        assert rule.heads is not None
        return "" if size % rule.heads == 0 else f"heads must divide its {size} {rows}"
    total, heads = sum(rule.split), rule.heads or 1
    if total * heads == size:
        return ""
    found = f"{total} x {heads} heads" if rule.heads else f"{total}"
    other = shape[1 - rule.split_dim] == total * heads
    hint = f' (for its {"columns" if rows == "rows" else "rows"}, set "split_dim")' * other
    return f"the sizes must add up to its {size} {rows}, but add up to {found}{hint}"


def steps(
    rule: GroupRule,
    p: Weight,
    g: Gradient,
    s: State,
    t: int,
    whole: Shard,
    average: Any,
) -> list[StepGenerator]:
    """Returns the generators that step a run: one, or one for each section.

    ``average`` is as ``ema.average`` returns it. A rule that has sections has one number of state
    per element.
    """
    sections = of(rule, whole.shape)
    if not sections:
        return [ema.averaged(rule.step(p, g, s, t, whole), rule, p, average, t, whole)]
    made = []
    for shift, places, shard in _divided(sections, whole):
        own = _Copies(places)
        kept = {key: own.of(s[key]) for key in rule.state_spec(shard) if key != ema.EMA}
        part = sixteen_bit.changed(p, own.of, shift)
        e = None if average is None else sixteen_bit.changed(average, own.of, shift)
        step = rule.step(part, expert_stacks.part(g, own.read), kept, t, shard)
        made.append(own.step(ema.averaged(step, rule, part, e, t, shard)))
    return made


@functools.lru_cache(4096)
def _divided(
    sections: Sequence[Section], whole: Shard
) -> tuple[tuple[int, tuple[StridedRange, ...], Shard], ...]:
    """For each section: the offset of its random bits, its places in the run, and its shard."""
    found, first = [], 0
    for turn, section in enumerate(sections):
        shard = section.shard(whole, turn)
        found.append((first + shard.start - whole.start, section.places(whole), shard))
        first += shard.numel
    return tuple(found)


class _Copies:
    """A section's elements of a run's tensors: a view if they are consecutive, else a copy."""

    def __init__(self, places: Sequence[StridedRange]) -> None:
        self.places = places
        self.are_consecutive = len(places) < 2 and all(place.count == 1 for place in places)
        self.made: list[tuple[Tensor, Tensor]] = []  # runs, and copies to write back

    def read(self, run: Tensor) -> Tensor:
        """Returns the elements, [n]."""
        if self.are_consecutive:
            at = self.places[0] if self.places else StridedRange(0, 0, 0, 0)
            return run[at.first : at.first + at.width]
        return torch.cat([x.flatten() for x in self._views(run)])

    def of(self, run: Tensor) -> Tensor:
        """Returns the elements, [n]. What is written to them is in the run when the step ends."""
        own = self.read(run)
        if not self.are_consecutive:
            self.made.append((run, own))
        return own

    def step(self, steps: StepGenerator) -> StepGenerator:
        """Yields from a rule's step, then writes the copies back."""
        yield from steps
        for run, own in self.made:
            views = self._views(run)
            for view, new in zip(views, own.split([x.numel() for x in views]), strict=True):
                view.copy_(new.view_as(view))

    def _views(self, run: Tensor) -> list[Tensor]:
        """The elements in the memory of a run, [count, width] for each place."""
        assert run.is_contiguous()
        return [
            run.as_strided((x.count, x.width), (x.step, 1), run.storage_offset() + x.first)
            for x in self.places
        ]
