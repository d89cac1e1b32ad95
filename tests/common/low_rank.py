"""apollo_torch with our projection put in, and torch's Muon in a dtype to compare with."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import apollo_torch
import torch
from apollo_torch import random_projector
from torch import Tensor

from ds_ext.ops import rounding, schema
from tests.common.reference import normal_numbers


@functools.cache
def projection(side: int, rank: int, period: int, stream: int) -> Tensor:
    """P [side, rank] in fp64, from the formula of the counter written out in the tests."""
    numbers = normal_numbers(stream, rounding.fold(0) + period * schema.PRIME2, period, side * rank)
    return torch.from_numpy(numbers).view(side, rank).double() / rank**0.5


class Projector(random_projector.GradientProjector):
    """Theirs, with our P; ``seed`` is the parameter's stream."""

    def update_ortho_matrix(self, full_rank_grad, proj_type):
        self.period = getattr(self, "period", -1) + 1
        self.ortho_matrix = self.get_orthogonal_matrix(
            full_rank_grad, self.rank, proj_type, self.seed
        )

    def get_orthogonal_matrix(self, weights, rank, type, seed):
        q = projection(min(weights.shape), rank, self.period, seed)
        return (q.T if type == "right" else q).contiguous().to(weights.dtype)


class APOLLO(apollo_torch.APOLLOAdamW):
    """apollo_torch's optimizer of matrices: parameters with the streams of their random numbers.

    ``gap`` is "update_proj_gap" of a group.
    """

    def __init__(
        self, streams: Mapping[Tensor, int], rank, scale, scale_type, gap, **hypers
    ) -> None:
        low = {"rank": rank, "scale": scale, "scale_type": scale_type, "update_proj_gap": gap}
        low |= {"proj": "random", "proj_type": "std"}
        super().__init__([{"params": list(streams), **low}], **hypers)
        for p, stream in streams.items():
            self.state[p]["seed"] = stream

    def step(self, closure=None):
        for state in self.state.values():  # ours is not limited after an update of 0
            if "scaled_grad" in state and not state["scaled_grad"]:
                del state["scaled_grad"]
        with mock.patch.object(apollo_torch.apollo, "GradientProjector", Projector):
            return super().step(closure)


class Muon(getattr(torch.optim, "Muon", torch.optim.Optimizer)):  # before torch 2.9 it has none
    """torch's, which iterates in fp64."""

    def step(self, closure=None):
        with in_dtype(torch.float64):
            return super().step(closure)


@contextlib.contextmanager
def in_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch.optim.Muon computes in what it calls bfloat16; here that is ``dtype``."""
    convert = torch.Tensor.to

    def converted(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dtype") is torch.bfloat16:  # since torch 2.15
            kwargs["dtype"] = dtype
        return convert(x, *args, **kwargs)

    with (
        mock.patch.object(torch.Tensor, "bfloat16", lambda x: convert(x, dtype, copy=True)),
        mock.patch.object(torch.Tensor, "to", converted),
    ):
        yield
