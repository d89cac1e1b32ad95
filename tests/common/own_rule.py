"""A rule that a test writes itself, in the registry while the test runs."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ds_ext import rules
from ds_ext.hyperparams import NonNegative
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, Parts


@contextlib.contextmanager
def registered(
    step: Callable[..., Any], is_batched: bool = False, dtype: torch.dtype | None = None, **how: Any
) -> Iterator[type]:
    """A rule named "Own", with moments "m" and "v" of ``dtype``, by default the accumulator's.

    ``how`` are further arguments of ``register``.
    """

    @dataclass(frozen=True)
    class Own:
        lr: NonNegative = 0.1

        def state_spec(self, shard: Shard) -> Parts:
            return {"m": Part.like(shard, dtype), "v": Part.like(shard, dtype)}

    Own.step = step
    rules.register(paper="", state="", rounds="", is_batched=is_batched, **how)(Own)
    try:
        yield Own
    finally:
        del rules.REGISTRY["own"]
