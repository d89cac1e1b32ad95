"""Parameters [experts, ...] that stack experts: each of these is stepped as a parameter of its own.

Hugging Face's fused experts, DeepSpeed's AutoEP and the like keep all experts of a layer in one
tensor. An expert has its own statistics, RMS, norm and basis: its rule runs on the part of the
rank's run that lies in it, be that empty, and its state is kept under its number.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn

from ds_ext import ops
from ds_ext.ops import Gradient
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Parts, State

EXPERTS = "experts"  # the key of their states in that of their parameter


Shape: TypeAlias = tuple[int, ...]


def plain_shape(param: Tensor) -> Shape:
    """The shape of a parameter that this process holds whole."""
    return tuple(param.shape)


def find(module: nn.Module, shape: Callable[[Tensor], Shape] = plain_shape) -> set[Tensor]:
    """The parameters that stack experts; ``shape`` tells that of a whole parameter.

    Those of three dimensions or more in a module that counts their first as ``num_experts``, or,
    if it counts none, whose name or class ends in "experts"; never a convolution's. And the biases
    beside them that have two dimensions, the first of the same size.
    """
    found: set[Tensor] = set()
    for name, owner in module.named_modules():
        own = dict(owner.named_parameters(recurse=False))
        sizes = {shape(p)[0] for p in own.values() if len(shape(p)) > 2}
        if len(sizes) == 1 and _holds_experts(name, owner, *sizes):
            for key, p in own.items():
                is_bias = "bias" in key and len(shape(p)) == 2
                if shape(p)[:1] == (*sizes,) and (is_bias or len(shape(p)) > 2):
                    found.add(p)
    return found


def _holds_experts(name: str, owner: nn.Module, size: int) -> bool:
    if isinstance(owner, nn.modules.conv._ConvNd):
        return False
    names = name.rpartition(".")[2], type(owner).__name__
    named = any(n.lower().endswith("experts") for n in names)
    count = getattr(owner, "num_experts", None)
    return count == size if isinstance(count, int) else named


@functools.lru_cache(4096)
def split(shard: Shard) -> tuple[tuple[slice, Shard], ...]:
    """For each expert: where its elements lie in a run of the stack, and its own shard of them."""
    assert shard.split is None, "experts that tensor parallelism divides"
    count, *own = shard.shape
    n = shard.numel // count if count else 0
    parts = []
    for i, first in enumerate(range(0, shard.numel, n or 1)):
        start, stop = (min(max(at - first, 0), n) for at in (shard.start, shard.stop))
        at = min(max(first - shard.start, 0), len(shard))
        before, turn = shard.before + first, shard.turn + i
        piece = Shard(tuple(own), start, stop, shard.size, before=before, turn=turn)
        parts.append((slice(at, at + stop - start), piece))
    return tuple(parts)


def keeps(rule: Any, shard: Shard, first: int = 0) -> Parts:
    """What ``rule`` keeps of a stack, whose experts are numbered from ``first``."""
    return {EXPERTS: {str(i): rule.keeps(own) for i, (_, own) in enumerate(split(shard), first)}}


def check_state(optimizer: str, param: Tensor, state: State, stacked: bool) -> None:
    """Raises ValueError for a state by expert of a parameter that is no stack, and the reverse."""
    if (EXPERTS in state) != stacked:
        raise ValueError(
            f"{optimizer}: the state of a parameter of shape {tuple(param.shape)} was made with"
            f"{'out' if stacked else ''} its experts separate. Call "
            "optimizer.separate_experts(model) before the first step, and before "
            "load_state_dict, in both runs or in neither."
        )


def part(g: Gradient, run: slice) -> Gradient:
    """Some elements of a run of gradients."""
    if isinstance(g, Tensor):
        return g[run]
    assert isinstance(g.x, Tensor)
    return ops.Scaled(g.x[run], g.factor, g.bound)
