"""Learning rates to begin with: the one table that docs, planner, configs and examples read.

A rate is the peak of a fine-tune of all weights with warm-up. Those that are measured come from
``python -m benchmarks quality`` (benchmarks/results/quality), short fine-tunes of one small model
on three data sets: the rate that gives up least, on the data set where it gives up most, of what
fine-tuning gains with the best one. Larger models and long runs may want less, so half of it and
twice are to be tried before anything else.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rate:
    """Where to begin."""

    start: float
    params: Mapping[str, Any] = field(default_factory=dict)  # that it goes with, if not defaults

    @property
    def others(self) -> tuple[float, float]:
        """Returns the rates to try next."""
        return self.start / 2, self.start * 2


MODEL = "135M"  # parameters of the model that they were measured with

RATES: dict[str, Rate] = {  # by the lower-case name of the optimizer
    "lomo": Rate(3e-3),
    "adalomo": Rate(1e-3),
    "adafactor": Rate(1e-3, {"relative_step": False}),  # AdaLomo's steps
    "came": Rate(1e-5),
    "lamb": Rate(3e-4),
    "galoreadamw": Rate(1e-3),
    "adamw": Rate(1e-4),
    "flashadamw": Rate(1e-4),
    "lion": Rate(1e-4),
    "sinkgd": Rate(1e-3),
    "scale": Rate(1e-4),
    "apollo": Rate(3e-4),
    "apollomini": Rate(3e-4),
    "muon": Rate(3e-4, {"adjust_lr_fn": "match_rms_adamw"}),
}


def advice(optimizer: str) -> str:
    """Returns "start at 5e-4, try 2.5e-4 and 1e-3" and what that was measured with.

    Nothing is returned for an optimizer without a rate.

    Args:
        optimizer: its name, in any case.
    """
    rate = RATES.get(optimizer.lower())
    if rate is None:
        return ""
    low, high = map(shown, rate.others)
    params = "".join(f", with {json.dumps(k)}: {json.dumps(v)}" for k, v in rate.params.items())
    measured = f"measured on a model of {MODEL}{params}"
    return f"start at {shown(rate.start)}, try {low} and {high} ({measured})"


def shown(rate: float) -> str:
    """Returns a rate as papers write it: 5e-4."""
    digits, _, power = f"{rate:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"
