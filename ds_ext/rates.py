"""Learning rates for docs, configs, messages, planner and examples: the table ``rates.json``.

A rate is the peak of a schedule with warm-up. There are three kinds:

- ``Rate.start`` was measured in short fine-tunes of one small model on three data sets
  (``python -m benchmarks quality``, benchmarks/results/quality). It is the lowest rate whose worst
  case over the data sets is within ``TOLERANCE`` of the best rate's worst case. Larger models and
  longer runs need lower rates.
- ``Rate.published`` was published for models of about 7B parameters, or for the model in its
  ``run``. Each value was checked at its source.
- The default of an optimizer's ``lr`` is its authors' (``ds_ext.rules``).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Published:
    """A published rate, and its setting."""

    lr: tuple[float, ...]  # one rate, or the lowest and the highest
    run: str  # the model and the task
    schedule: str
    weight_decay: str
    source: str  # a URL
    other_source: str = ""  # of another rate that ``run`` names
    is_start: bool = True  # for fine-tuning with default params, so that others may start at it


@dataclass(frozen=True)
class Rate:
    """The rates of an optimizer."""

    start: float
    params: Mapping[str, Any] = field(default_factory=dict)  # non-default ones of the measurement
    published: Published | None = None

    @property
    def others(self) -> tuple[float, float]:
        """The rates to try next."""
        return self.start / 2, self.start * 2


MODEL = "135M"  # parameters of the model in the measurements
TOLERANCE = 0.025  # fraction of the gain from fine-tuning
LARGE = 10**9  # parameters of a model from which on published rates are used
PUBLISHED = 7 * 10**9  # parameters of most models of published rates
UNUSUAL = 100  # times the largest known rate: above this a warning is given
LORA = "lora"  # adapters trained by AdamW: the only entry that is not an optimizer


def _read() -> dict[str, Rate]:
    """The rates of ``rates.json``, by the lower-case name of the optimizer."""
    found = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    for rate in found.values():
        if "published" in rate:
            own = rate["published"]
            rate["published"] = Published(**own | {"lr": tuple(own["lr"])})
    return {name: Rate(**rate) for name, rate in found.items()}


RATES = _read()


def for_size(optimizer: str, parameters: int) -> tuple[float, str] | None:
    """Returns the rate to start a fine-tune at, and where it is from; None if none is known.

    Models of at least ``LARGE`` parameters get the published rate, if it is for fine-tuning with
    default params. Others get the measured rate.

    Args:
        optimizer: the optimizer's name; case does not matter.
        parameters: the number of the model's parameters.
    """
    rate = RATES.get(optimizer.lower())
    if rate is None:
        return None
    if parameters < LARGE:
        return rate.start, f"measured on a model of {MODEL} parameters"
    published = rate.published
    if published is not None and published.is_start:
        larger = "; yours is larger, and may need a lower one" * (parameters > 2 * PUBLISHED)
        return published.lr[0], f"published for {published.run}: {published.source}{larger}"
    return rate.start, f"measured on a model of {MODEL} parameters; larger ones need lower rates"


def largest_usual(optimizer: str) -> float:
    """Returns the rate above which a user is warned; infinite for an unknown optimizer."""
    rate = RATES.get(optimizer.lower())
    if rate is None:
        return math.inf
    known = [rate.start, *(rate.published.lr if rate.published else ())]
    return UNUSUAL * max(known)


def advice(optimizer: str) -> str:
    """Returns "start at 1e-3, try 5e-4 and 2e-3", the measured model, and published rates.

    Returns "" for an optimizer without a rate.

    Args:
        optimizer: the optimizer's name; case does not matter.
    """
    rate = RATES.get(optimizer.lower())
    if rate is None:
        return ""
    low, high = map(shown, rate.others)
    params = "".join(f", with {json.dumps(k)}: {json.dumps(v)}" for k, v in rate.params.items())
    measured = f"measured on a model of {MODEL}{params}"
    told = f"start at {shown(rate.start)}, try {low} and {high} ({measured})"
    if rate.published is None:
        return told
    return f"{told}; published: {span(rate.published)} ({rate.published.run})"


def span(published: Published) -> str:
    """Returns a published rate or range as text: "1e-5 to 2e-5"."""
    return " to ".join(map(shown, published.lr))


def shown(rate: float) -> str:
    """Returns a rate as text in the form of papers: 5e-4."""
    digits, _, power = f"{rate:.2e}".partition("e")
    return f"{digits.rstrip('0').removesuffix('.')}e{int(power)}"
