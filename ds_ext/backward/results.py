"""The result of a step, and its metrics."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ds_ext.backward.step_state import StepState
from ds_ext.distributed.layout import Layout
from ds_ext.optimizer import RuleOptimizer, update_stats


class StepResult(NamedTuple):
    """How a step ended."""

    norm: float  # of all gradients before clipping; not finite if one of them was not
    overflow: bool  # whether a gradient was bad: not finite, or too large
    skipped: bool  # whether no parameter was stepped because of that


def collect_metrics(
    state: StepState, optimizer: RuleOptimizer, layout: Layout, skipped_steps: int
) -> dict[str, float]:
    """Returns the metrics of a step whose norm is known; all ranks call it.

    Clears the optimizer's update statistics, and the layout's count of bytes sent.
    """
    assert state.norm is not None
    return {
        "grad_norm": state.norm,
        "clip_coefficient": state.coefficient,
        "clipped_fraction": state.clipped_fraction(),
        "skipped_parameters": len(state.bad),
        "skipped_steps": skipped_steps,
        **_sizes(optimizer, layout),
        "bytes_sent": layout.take_bytes_sent(),
    }


def _sizes(optimizer: RuleOptimizer, layout: Layout) -> dict[str, float]:
    """The RMS of updates and of weights by parameter group, if they are measured."""
    if optimizer.update_stats is None:
        return {}
    totals = layout.total(optimizer.update_stats.sums().to(layout.device))
    optimizer.update_stats.clear()
    groups = optimizer.index.groups
    figures = zip(map(_name_of, groups, range(len(groups))), update_stats.rms(totals), strict=True)
    return {f"{key}/{name}": value for name, group in figures for key, value in group.items()}


def _name_of(group: Mapping[str, Any], number: int) -> str:
    """The name of a group in metrics: its own, with characters of file names, or its position."""
    return re.sub(r"[^\w.-]+", "_", group.get("name", "")) or str(number)
