"""Hyper-parameters with which few steps show much of a rule: one table for all tests."""

from typing import Any

Hypers = dict[str, Any]

# By rule: of random gradients, and of the losses of small models.
SIMULATED: dict[str, Hypers] = {
    "lomo": {"lr": 0.02, "weight_decay": 0.1},
    "adalomo": {"lr": 0.02, "weight_decay": 0.1},
    "adafactor": {"lr": 0.02, "relative_step": False, "beta1": 0.9, "weight_decay": 0.1},
    "came": {"lr": 2e-3, "weight_decay": 0.1},
    "lamb": {"lr": 0.02, "weight_decay": 0.1},
    "galoreadamw": {"lr": 0.02, "rank": 3, "update_proj_gap": 2, "weight_decay": 0.1},
}
TRAINED: dict[str, Hypers] = {
    "lomo": {"lr": 0.05},
    "adalomo": {"lr": 0.01},
    "adafactor": {"lr": 0.01, "relative_step": False, "beta1": 0.9},
    "came": {"lr": 1e-3},
    "lamb": {"lr": 0.01},
    "galoreadamw": {"lr": 0.01, "rank": 3},
}
# What a rule cannot do without here: a rate that is given, a rank below a small matrix's own.
NEEDED: dict[str, Hypers] = {
    "adafactor": {"lr": 0.01, "relative_step": False},
    "galoreadamw": {"rank": 2},
}


def changed(table: dict[str, Hypers], **own: Hypers) -> dict[str, Hypers]:
    """A table with other settings, or further ones, of the rules that are named."""
    return {rule: hypers | own.get(rule, {}) for rule, hypers in table.items()}
