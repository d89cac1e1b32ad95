"""The one table that the tests run over: rules, their settings, shapes, ranks and gradients."""

from typing import Any

import torch
from torch import Tensor

from ds_ext.testing import simulation

Hypers = dict[str, Any]


# Settings of rules that are compared with their authors' code.
RULES: dict[str, dict[str, Hypers]] = {
    "lomo": {"defaults": {}, "decay": {"lr": 0.02, "weight_decay": 0.1}},
    "adalomo": {
        "defaults": {},
        "decay": {"lr": 0.02, "weight_decay": 0.1},
        "eps": {"lr": 0.02, "eps": (0.1, 0.9)},
        "clip": {"lr": 0.02, "clip_threshold": 0.3, "decay_rate": -0.5},
        "no-clip": {"lr": 0.02, "clip_threshold": 50.0},
    },
    "adafactor": {
        "defaults": {},
        "decay": {"weight_decay": 0.1},
        "momentum": {"beta1": 0.9, "weight_decay": 0.1},
        "warmup": {"warmup_init": True, "weight_decay": 0.1},
        "lr": {"lr": 0.02, "relative_step": False, "weight_decay": 0.1},
        "lr-unscaled": {"lr": 0.02, "relative_step": False, "scale_parameter": False}
        | {"weight_decay": 0.1},
        "unscaled": {"scale_parameter": False, "beta1": 0.5},
        "eps-clip": {"eps": (0.1, 0.9), "clip_threshold": 0.3, "decay_rate": -0.5},
    },
    "came": {
        "defaults": {},
        "decay": {"lr": 2e-3, "weight_decay": 0.1},
        "betas-eps": {"lr": 2e-3, "betas": (0.8, 0.99, 0.995), "eps": (0.1, 0.05)},
        "clip": {"clip_threshold": 0.3},
        "no-clip": {"clip_threshold": 50.0, "betas": (0.9, 0.9, 0.9)},
    },
}

SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (1,),
    (5,),
    (1000,),
    (1, 1),
    (1, 7),
    (7, 1),
    (3, 5),
    (16, 16),
    (13, 29),
    (64, 33),
    (5, 1, 3),
    (4, 3, 5),
    (2, 3, 4, 5),
)
VECTORS = tuple(shape for shape in SHAPES if len(shape) < 2)
WORLDS = [1, 2, 3, 7, 16]


def weights(shapes=SHAPES, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return simulation.weights(shapes, dtype)


def gradients(steps: int, shapes=SHAPES, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    return simulation.gradients(steps, shapes, dtype)
