"""Parameters [experts, ...] that stack experts: each is stepped as a separate parameter.

Hugging Face's fused experts, DeepSpeed's AutoEP and others keep all experts of a layer in one
tensor. An expert has its own statistics, RMS, norm and basis. Its rule steps the part of the rank's
run that lies in the expert, which may be empty. Its state is kept under its number.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

from torch import Tensor, nn

from ds_ext import ops
from ds_ext.ops import Gradient
from ds_ext.ops.shard import Section, Shard, divided
from ds_ext.ops.state import NestedState, Parts, State
from ds_ext.rules import Rule

EXPERTS = "experts"  # the key of their states in the state of the parameter


Shape: TypeAlias = tuple[int, ...]


def plain_shape(param: Tensor) -> Shape:
    """Returns the shape of a parameter that this process holds whole."""
    return tuple(param.shape)


def find(module: nn.Module, shape: Callable[[Tensor], Shape] = plain_shape) -> set[Tensor]:
    """Returns the parameters that stack experts; ``shape`` returns the shape of a whole parameter.

    A stack has three dimensions or more, and its module has a ``num_experts`` equal to the first.
    If the module has no ``num_experts``, its name or class must end in "experts". Convolutions have
    no stacks. A bias of such a module is a stack if it has two dimensions, with the same first one.
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
    """Returns, for each expert, the slice of its elements in a run of the stack, and its shard."""
    count, *own = shard.shape
    n = math.prod(own)
    return divided(tuple(Section(tuple(own), i * n) for i in range(count if n else 0)), shard)


def matrices(shard: Shard, state: State) -> Iterator[tuple[slice, Shard, State]]:
    """Yields the run, the shard and the state of a parameter, or of each expert of a stack."""
    if EXPERTS not in state:
        yield slice(0, len(shard)), shard, state
        return
    for (run, own), s in zip(split(shard), state[EXPERTS].values(), strict=True):
        yield run, own, s


def state_spec(rule: Rule, shard: Shard, first: int = 0) -> Parts:
    """Returns the state that ``rule`` declares for a stack; experts are numbered from ``first``."""
    return {
        EXPERTS: {str(i): rule.state_spec(own) for i, (_, own) in enumerate(split(shard), first)}
    }


def check_state(optimizer: str, param: Tensor, state: NestedState, stacked: bool) -> None:
    """Raises ValueError if a stack's state is not nested by expert, or another state is."""
    if (EXPERTS in state) != stacked:
        found, advice = "has", "before load_state_dict, as the run that saved it did"
        if stacked:
            found, advice = "lacks", "before the first step"
        raise ValueError(
            f"{optimizer}: the state of a parameter of shape {tuple(param.shape)} {found} one "
            f"entry per expert. Call optimizer.separate_experts(model) {advice}."
        )


def part(g: Gradient, run: slice) -> Gradient:
    """Returns some elements of a run of gradients."""
    if isinstance(g, Tensor):
        return g[run]
    assert isinstance(g.x, Tensor)
    return ops.Scaled(g.x[run], g.factor, g.bound)
