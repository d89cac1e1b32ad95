"""What a rank saves of a run, and how it is put back: its runs of weights and its rule state.

Everything is under parameters' names, in plain tensors and numbers. A checkpoint is loaded by as
many ranks as wrote it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ds_ext.optimizer import RuleOptimizer

VERSION = 2


def save(
    optimizer: RuleOptimizer, names: Mapping[Tensor, str], runs: Mapping[str, Tensor], ranks: int
) -> dict[str, Any]:
    """This rank's part of a checkpoint; ``runs`` are its runs of all weights, frozen ones too."""
    return {
        "ds_ext": VERSION,
        "optimizer": type(optimizer).__name__,
        "ranks": ranks,
        "weights": {name: run.detach().clone() for name, run in runs.items()},
        "state": {names[p]: state for p, state in optimizer.state.items()},
        "groups": [
            {**group, "params": [names[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


@torch.no_grad()
def load(
    saved: Mapping[str, Any],
    optimizer: RuleOptimizer,
    names: Mapping[Tensor, str],
    runs: Mapping[str, Tensor],
    ranks: int,
    with_state: bool,
) -> None:
    """Puts back what ``save`` made: weights in place, and state and groups if ``with_state``.

    Raises ValueError, before anything is changed, for a checkpoint of another kind.
    """
    _check(saved, optimizer, runs, ranks)
    if with_state:
        _check_groups(saved, optimizer, names)
    for name, run in runs.items():
        run.copy_(saved["weights"][name])
    if with_state:
        numbers = {names[p]: i for p, i in optimizer.number_of.items()}
        optimizer.load_state_dict(
            {
                "state": {numbers[name]: state for name, state in saved["state"].items()},
                "param_groups": [
                    {**group, "params": [numbers[name] for name in group["params"]]}
                    for group in saved["groups"]
                ],
            }
        )


def _check(
    saved: Mapping[str, Any], optimizer: RuleOptimizer, runs: Mapping[str, Tensor], ranks: int
) -> None:
    kind = type(optimizer).__name__
    if not isinstance(saved, Mapping) or saved.get("ds_ext") != VERSION:
        raise ValueError(f"this checkpoint was not written by ds_ext (format {VERSION}).")
    if saved["optimizer"] != kind:
        raise ValueError(f"this checkpoint is of {saved['optimizer']}, the optimizer is {kind}.")
    if saved["ranks"] != ranks:
        raise ValueError(f"this checkpoint is of {saved['ranks']} ranks and cannot load on {ranks}")
    shapes = {name: run.shape for name, run in runs.items()}
    if {name: run.shape for name, run in saved["weights"].items()} != shapes:
        differ = sorted(set(shapes).symmetric_difference(saved["weights"])) or sorted(shapes)
        raise ValueError(f"this checkpoint is of another model; parameters differ: {differ[:5]}")


def _check_groups(
    saved: Mapping[str, Any], optimizer: RuleOptimizer, names: Mapping[Tensor, str]
) -> None:
    groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    if [group["params"] for group in saved["groups"]] != groups:
        raise ValueError("this checkpoint has other parameter groups than the optimizer.")
