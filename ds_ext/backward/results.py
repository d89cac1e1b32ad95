"""How a step ended: what its caller is told, and the numbers that ``metrics`` tells."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ds_ext.backward.tally import Tally
from ds_ext.distributed.layout import Layout
from ds_ext.optimizer import RuleOptimizer, meter


class StepResult(NamedTuple):
    """How a step ended."""

    norm: float  # of all gradients before clipping; not finite if one of them was not
    overflow: bool  # whether a gradient was not finite
    skipped: bool  # whether no parameter was stepped because of that


def measured(
    tally: Tally, optimizer: RuleOptimizer, layout: Layout, skipped_steps: int
) -> dict[str, float]:
    """Returns what ``metrics`` tells of a step; all ranks call it.

    Args:
        tally: of the step, whose norm is known.
        optimizer: whose meter, if there is one, has measured it, and is cleared.
        layout: whose count of bytes sent begins anew.
        skipped_steps: so far.
    """
    assert tally.norm is not None
    return {
        "grad_norm": tally.norm,
        "clip_coefficient": tally.coefficient,
        "clipped_fraction": tally.clipped_fraction(),
        "skipped_parameters": len(tally.bad),
        "skipped_steps": skipped_steps,
        **_sizes(optimizer, layout),
        "bytes_sent": layout.take_bytes_sent(),
    }


def _sizes(optimizer: RuleOptimizer, layout: Layout) -> dict[str, float]:
    """The RMS of updates and of weights by parameter group, if they are measured."""
    if optimizer.meter is None:
        return {}
    totals = layout.total(optimizer.meter.sums().to(layout.device))
    optimizer.meter.clear()
    groups = optimizer.index.groups
    figures = zip(map(_name_of, groups, range(len(groups))), meter.rms(totals), strict=True)
    return {f"{key}/{name}": value for name, group in figures for key, value in group.items()}


def _name_of(group: Mapping[str, Any], number: int) -> str:
    """What metrics call a group: its name, fit for a file's, or else its number."""
    return re.sub(r"[^\w.-]+", "_", group.get("name", "")) or str(number)
