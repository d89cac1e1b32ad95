"""Gradients that are kept projected: they add up in the space of their rule's moments.

Of the projection of a whole gradient, each rank keeps a part in proportion to its run. A rule that
projects gradients, such as GaLoreAdamW, has ``projected_numel``, ``projection_key`` and
``accumulate``; its ``step`` takes what ``accumulate`` returns in place of a gradient.
"""

from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.distributed import lockstep
from ds_ext.distributed.lockstep import StepGenerator
from ds_ext.distributed.placement import Placement
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import RuleOptimizer, expert_stacks, host_offload, state_checks
from ds_ext.optimizer.bucket_optimizer import by_device
from ds_ext.optimizer.host_offload import HostOffload
from ds_ext.optimizer.plans import with_turns
from ds_ext.optimizer.updates import ProjectedGrads, RunUpdate


def projected(optimizer: RuleOptimizer, shards: Mapping[Tensor, Shard]) -> dict[Tensor, int]:
    """Returns the parameters whose gradients their rules project, and how many numbers remain.

    They are equal on all ranks.
    """
    numels = {
        p: expert_stacks.projected_numel(optimizer.rule_of(p), shard, p in optimizer.stacks)
        for p, shard in shards.items()
    }
    return {p: numel for p, numel in numels.items() if numel}


@torch.no_grad()
def project(
    optimizer: RuleOptimizer,
    updates: Iterable[RunUpdate],
    collectives: Placement | None,
    kept: dict[Tensor, ProjectedGrads],
    dtype: torch.dtype | None,
) -> None:
    """Adds the projections of gradients to ``kept``, and makes missing states.

    Args:
        optimizer: the optimizer that will step by them.
        updates: runs of parameters that ``projected`` returns, as of ``BucketOptimizer.update``.
        collectives: as of ``BucketOptimizer.update``.
        kept: the projected gradients of the step so far.
        dtype: of kept numbers; None: that of the projection.

    Raises:
        ValueError: a state does not fit its parameter.
        RuntimeError: as of ``refuse_replaced``.
    """
    refuse_replaced(optimizer, kept)
    for on_device in by_device(updates):
        for u in on_device:
            state = optimizer.state[u.param]
            if state:
                state_checks.check(optimizer, u, state, None)
            else:
                state_checks.make(optimizer, u, state)
        generators: list[StepGenerator] = []
        for u in with_turns(optimizer, on_device):
            rule, state = optimizer.rule_of(u.param), optimizer.state[u.param]
            generators += accumulate(rule, u, state, optimizer.offload, kept, dtype)
        lockstep.run(generators, collectives)


def accumulate(
    rule: Any,
    u: RunUpdate,
    state: dict[str, Any],
    offload: HostOffload | None,
    kept: dict[Tensor, ProjectedGrads],
    dtype: torch.dtype | None,
) -> Iterator[StepGenerator]:
    """Yields the generators that add the projection of a gradient to those in ``kept``.

    ``state`` is the parameter's, as ``offload`` stores it; ``dtype`` see ``project``.
    """
    parts = kept.setdefault(u.param, ProjectedGrads(u.g.numel(), state, u.param.dtype)).parts
    key, t = rule.projection_key, state["step"] + 1

    def add(number: int, s: dict[str, Any], g: ops.Gradient, shard: Shard) -> StepGenerator:
        before = host_offload.to_device(s[key], g.device)
        own, part = {key: before}, parts.get(number)
        parts[number] = yield from rule.accumulate(part, g, own, t, shard, dtype)
        if (new := own[key]) is not before:
            s[key] = new if offload is None else offload.to_host(new, s[key])

    for i, (run, shard, s) in enumerate(expert_stacks.matrices(u.shard, state)):
        yield add(i, s, expert_stacks.part(u.g, itemgetter(run)), shard)


def refuse_replaced(optimizer: RuleOptimizer, kept: Mapping[Tensor, ProjectedGrads]) -> None:
    """Raises RuntimeError if a state is no longer that by which gradients were projected."""
    for param, grad in kept.items():
        if optimizer.state.get(param) is not grad.state or param.dtype != grad.param_dtype:
            raise RuntimeError(
                f'gradient_policy = "projected": the state or the dtype of {optimizer.name(param)} '
                "was replaced between backward and the end of the step, and gradients were "
                "projected by the old one. Replace it between steps; to discard this step, "
                "call zero_grad()."
            )


def drop_unstepped(optimizer: RuleOptimizer, params: Iterable[Tensor]) -> None:
    """Drops the states of parameters that were never stepped."""
    for param in params:
        if optimizer.state.get(param, {}).get("step") == 0:
            del optimizer.state[param]
