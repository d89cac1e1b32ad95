"""Gradients that are kept projected: they add up in the space of their rule's moments.

Of the projection of a whole gradient, each rank keeps a part in proportion to its run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.distributed.lockstep import StepGenerator
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import expert_stacks, host_offload
from ds_ext.optimizer.host_offload import HostOffload
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.rules import ProjectedGrad, ProjectingRule


def projected_numel(rule: Any, shard: Shard, is_stack: bool) -> int:
    """Returns the elements of a parameter's projected gradient; 0 if it is not projected.

    Args:
        rule: the rule of the parameter.
        shard: a run of the parameter. The result is the same for each run.
        is_stack: whether the parameter stacks experts, which are projected one by one.
    """
    if not hasattr(rule, "step_projected") or not shard.numel:  # no ``ProjectingRule``
        return 0
    shards = [own for _, own in expert_stacks.split(shard)] if is_stack else [shard]
    return sum(map(rule.projected_numel, shards))


@dataclass
class KeptProjection:
    """This rank's part of the projected gradient of a matrix."""

    shape: torch.Size  # of the whole projection
    dtype: torch.dtype  # as of ``ProjectedGrad``
    values: Tensor  # [n], the part


@dataclass
class KeptGrad:
    """The projected gradients of a parameter: one, or one for each expert of a stack."""

    numel_of_run: int
    state: dict[str, Any]  # of the parameter, with its projection
    param_dtype: torch.dtype
    parts: dict[int, KeptProjection] = field(default_factory=dict)

    @property
    def values(self) -> list[Tensor]:
        """The kept numbers, [n] of each part."""
        return [part.values for part in self.parts.values()]

    @property
    def device(self) -> torch.device:
        """The device of the gradient."""
        return self.values[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradient."""
        return self.values[0].dtype

    def numel(self) -> int:
        """Returns the number of elements in the run of the gradient."""
        return self.numel_of_run

    def square(self) -> Tensor:
        """Returns the sum of squares of this rank's part, []."""
        return ops.square_sums_of(self.values).sum()

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replaces the kept numbers by ``move`` of them."""
        for part in self.parts.values():
            part.values = move(part.values)

    def scaled_(self, factor: float) -> "KeptGrad":
        """Multiplies the kept numbers by a factor in place."""
        if factor != 1:
            for values in self.values:
                values.mul_(factor)
        return self


def accumulate(
    rule: ProjectingRule,
    u: RunUpdate,
    state: dict[str, Any],
    offload: HostOffload | None,
    kept: dict[Tensor, KeptGrad],
    dtype: torch.dtype | None,
) -> Iterator[StepGenerator]:
    """Yields the generators that add the projection of a gradient to those in ``kept``.

    The first gradient of a step renews the projection if the rule wants a new one.

    Args:
        rule: the rule of the parameter.
        u: the run of the gradient.
        state: its state, as it is stored.
        offload: stores the state.
        kept: the projected gradients of the step so far, by parameter.
        dtype: of kept numbers; None: that of the projection.
    """
    parts = kept.setdefault(u.param, KeptGrad(u.g.numel(), state, u.param.dtype)).parts
    key, t = rule.projection_key, state["step"] + 1

    def add(number: int, s: dict[str, Any], g: ops.Gradient, shard: Shard) -> StepGenerator:
        """Adds the projection of a matrix's gradient."""
        projection = {key: host_offload.to_device(s[key], g.device)}
        if number not in parts:
            before = projection[key]
            yield from rule.renew(g, projection, t, shard)
            if (new := projection[key]) is not before:
                s[key] = new if offload is None else offload.to_host(new, s[key])
        r = yield from rule.project(g, projection, shard)
        values = r.values.view(-1)[_own(r.values.numel(), shard)]
        if number in parts:
            parts[number].values.add_(values)
        else:
            own = values.to(dtype or values.dtype, copy=True)
            parts[number] = KeptProjection(r.values.shape, r.dtype, own)

    for i, (run, shard, s) in enumerate(expert_stacks.matrices(u.shard, state)):
        yield add(i, s, expert_stacks.part(u.g, run), shard)


def step(rule: Any, p: Any, g: Any, s: Any, t: int, shard: Shard) -> StepGenerator:
    """Returns the step of a rule by a gradient, or by a kept projection of it."""
    if isinstance(g, KeptProjection):
        return _step_projected(rule, p, g, s, t, shard)
    begun: StepGenerator = rule.step(p, g, s, t, shard)
    return begun


def _step_projected(
    rule: ProjectingRule, p: Any, g: KeptProjection, s: Any, t: int, shard: Shard
) -> StepGenerator:
    """Collects the projection from all ranks, and steps by it."""
    whole = torch.zeros(g.shape, dtype=ops.accumulator(g.values.dtype), device=g.values.device)
    whole.view(-1)[_own(whole.numel(), shard)] = g.values.to(whole.dtype)
    (values,) = yield (whole,)
    yield from rule.step_projected(p, ProjectedGrad(values, g.dtype), s, t, shard)


def _own(numel: int, shard: Shard) -> slice:
    """The elements of a flattened projection that a rank keeps. Each element is on one rank."""
    return slice(numel * shard.start // shard.numel, numel * shard.stop // shard.numel)
