"""Imported by Python at its start: torch.optim's SGD, Adam and AdamW become ds_ext's optimizers.

They take torch's arguments and compute torch's formulas: SGD is LOMO, and Adam is AdamW whose
weight decay is 0 by default. An argument that ds_ext lacks, such as momentum, raises ds_ext's
error, unless it is switched off or only changes torch's speed.
"""

import functools
import inspect
from typing import Any

import torch

import ds_ext

SPEED = ("foreach", "fused")


def swap(name: str, ours: Any) -> None:
    """Replaces ``torch.optim.<name>`` by a subclass of ``ours`` that takes the same arguments."""
    replaced = getattr(torch.optim, name)
    theirs = inspect.signature(replaced)
    ours_too = inspect.signature(ours).parameters

    @functools.wraps(replaced.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = theirs.bind(*args, **kwargs)
        given.apply_defaults()
        params, hypers = given.arguments.pop("params"), given.arguments
        for key in [key for key in hypers if key not in ours_too]:
            if key in SPEED or not hypers[key]:
                del hypers[key]
        super(made, self).__init__(params, **hypers)

    made = type(name, (ours,), {"__init__": __init__, "__module__": "torch.optim"})
    setattr(torch.optim, name, made)


swap("SGD", ds_ext.LOMO)
swap("Adam", ds_ext.AdamW)
swap("AdamW", ds_ext.AdamW)
