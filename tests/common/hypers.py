"""Hyper-parameters with which few steps show much of a rule: tables that know every rule.

A rule that is registered, also later on, has a row by itself: what it has of the values that all
rules share. A row of its own is written only where other values show more.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ds_ext.rules import REGISTRY

Hypers = dict[str, Any]


# Rules that step parameters of any shape; the others are for matrices of linear layers.
FOR_ALL = [name for name, entry in REGISTRY.items() if entry.any_shape]
BATCHED = [name for name, entry in REGISTRY.items() if entry.is_batched]


class Table(Mapping[str, Hypers]):
    """For each rule the ``shared`` values that it has a field for, or its ``own`` ones."""

    def __init__(self, shared: Hypers, own: Mapping[str, Hypers]) -> None:
        self.shared, self.own = shared, dict(own)

    def __getitem__(self, rule: str) -> Hypers:
        fields = {field.name for field in dataclasses.fields(REGISTRY[rule].rule)}
        shared = {name: value for name, value in self.shared.items() if name in fields}
        return shared | self.own.get(rule, {})

    def __iter__(self) -> Iterator[str]:
        return iter(REGISTRY)

    def __len__(self) -> int:
        return len(REGISTRY)


def changed(table: Table, **own: Hypers) -> Table:
    """A table with other settings, or further ones, of the rules that are named."""
    rows = {rule: table.own.get(rule, {}) | own.get(rule, {}) for rule in {*table.own, *own}}
    return Table(table.shared, rows)


# What some rules cannot do without here: a rate that is given, a rank below a small matrix's own.
_GIVEN = {"relative_step": False}
# Of random gradients, and of the losses of small models.
SIMULATED = Table(
    _GIVEN | {"lr": 0.02, "weight_decay": 0.1, "beta1": 0.9, "rank": 3, "update_proj_gap": 2},
    {"came": {"lr": 2e-3}, "scale": {"momentum": 0.9}, "sinkgd": {"lr": 0.4, "iterations": 2}},
)
TRAINED = Table(
    _GIVEN | {"lr": 0.01, "beta1": 0.9, "rank": 3},
    {
        "lomo": {"lr": 0.05},
        "came": {"lr": 1e-3},
        "muon": {"ns_dtype": "fp32"},  # bf16 products round differently on each number of ranks
        "scale": {"momentum": 0.9},
        "sinkgd": {"lr": 0.2},
    },
)
# The errors, relative to the update, of rules that are not exact: codes of 8 bits jump where
# gradients differ in their last bits, and Muon's iteration amplifies those of fp32.
CLOSE = {"flashadamw": 1e-2, "muon": 1e-3}
NEEDED = Table(_GIVEN | {"lr": 1e-3, "rank": 2}, {"muon": {"ns_dtype": "fp32"}})
