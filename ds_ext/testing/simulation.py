"""Ranks that are simulated in one process, and the weights and gradients that they step."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.distributed import lockstep
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import State, zeros
from ds_ext.rules.base import check_spec

Shape: TypeAlias = tuple[int, ...]
EXACT = 1e-9  # the largest error in fp64, relative to the update


class Ranks:
    """A bucket of parameters cut over ``world`` ranks, all simulated in this process.

    The cut is computed here, independently of ``Shard``, and each rank has its own memory.

    Args:
        rule: the rule with its hyper-parameters.
        params: the whole parameters.
        world: the number of ranks.
    """

    def __init__(self, rule: Any, params: Sequence[Tensor], world: int) -> None:
        self.rule, self.world, self.t = rule, world, 0
        self.shapes = [tuple(p.shape) for p in params]
        self.runs = self.cut(params)
        self.shards = [[Shard.of_rank(s, r, world) for s in self.shapes] for r in range(world)]
        self.states: list[list[State]] = [
            [
                zeros(check_spec(type(rule), rule.state_spec(shard)), p)
                for p, shard in zip(*rank, strict=True)
            ]
            for rank in zip(self.runs, self.shards, strict=True)
        ]

    def cut(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Returns copies of each rank's runs."""
        sizes = [-(-t.numel() // self.world) for t in tensors]
        return [
            [t.flatten()[r * n : (r + 1) * n].clone() for t, n in zip(tensors, sizes, strict=True)]
            for r in range(self.world)
        ]

    def step(
        self, grads: Sequence[Tensor], simulate: Callable[[Any], int] = lockstep.simulate
    ) -> int:
        """Steps the bucket by whole gradients; returns the number of rounds."""
        self.t += 1
        ranks = zip(self.runs, self.cut(grads), self.states, self.shards, strict=True)
        return simulate(
            [
                [
                    self.rule.step(p, ops.Scaled(g), s, self.t, shard)
                    for p, g, s, shard in zip(*rank, strict=True)
                ]
                for rank in ranks
            ]
        )

    @property
    def params(self) -> list[Tensor]:
        """The whole parameters."""
        return [
            torch.cat(runs).view(shape)
            for runs, shape in zip(zip(*self.runs, strict=True), self.shapes, strict=True)
        ]


@torch.no_grad()
def errors(
    found: Sequence[Tensor], expected: Sequence[Tensor], before: Sequence[Tensor]
) -> list[float]:
    """Returns the error of each parameter relative to its total update."""
    ratios = [
        (a.double() - b.double()).norm() / (b.double() - c.double()).norm()
        for a, b, c in zip(found, expected, before, strict=True)
    ]
    return [float(x.nan_to_num(nan=torch.inf)) for x in ratios]  # the largest of them is no NaN


def weights(shapes: Sequence[Shape], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns parameters whose RMS differ, from a fixed seed, on the default device."""
    generator = torch.Generator().manual_seed(1)
    scales = [2.0 ** (i % 5 - 2) for i in range(len(shapes))]
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") * scale).to(
            torch.get_default_device(), dtype
        )
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def gradients(
    steps: int, shapes: Sequence[Shape], dtype: torch.dtype = torch.float64
) -> list[list[Tensor]]:
    """Returns gradients of ``steps`` steps: full rank, scaled by row and column, of a common mean.

    They come from a fixed seed, and are on the default device.
    """
    generator = torch.Generator().manual_seed(2)

    def normal(shape: Shape) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    means = [normal(shape) for shape in shapes]
    scales = [
        normal((*shape[:-1], 1)).exp() * normal((*shape[:-2], 1, shape[-1])).exp()
        if len(shape) > 1
        else normal(shape).exp()
        for shape in shapes
    ]
    return [
        [
            ((mean + normal(tuple(mean.shape))) * scale).to(torch.get_default_device(), dtype)
            for mean, scale in zip(means, scales, strict=True)
        ]
        for _ in range(steps)
    ]


def with_zeros(grads: Sequence[Tensor]) -> list[Tensor]:
    """Returns gradients whose first row, last column, and some whole parameters are zero.

    Rows of an embedding have such gradients if no token uses them, and experts that are frozen.
    """
    found = []
    for i, g in enumerate(grads):
        g = g.clone()
        if g.dim() > 1:
            g[..., 0, :] = 0
            g[..., :, -1] = 0
        if i % 3 == 1 or g.dim() == 1:
            g.view(-1)[: g.numel() // 2] = 0
        found.append(torch.zeros_like(g) if i % 4 == 3 else g)
    return found
