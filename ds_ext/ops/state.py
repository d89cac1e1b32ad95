"""What a rule keeps of a parameter: a tensor's place in the whole parameter's state, and zeros.

A rule declares its state, ``keeps(shard)``, as ``Part``s nested in dicts. Making it, counting its
bytes, saving it and laying it out anew for another number of ranks follow from that.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, Union

import torch
from torch import Tensor

from ds_ext.ops import passes
from ds_ext.ops.shard import Shard


@dataclass(frozen=True)
class Part:
    """Elements ``[start, stop)``, on this rank, of the ``total`` that all ranks keep together.

    Ranks may keep the same elements, which then have the same values on them; what ``is_shared``
    lies whole on every rank. ``dtype`` None is the accumulator's of the parameter.
    """

    start: int
    stop: int
    total: int
    shape: tuple[int, ...]  # in which the rank keeps them
    dtype: torch.dtype | None = None
    is_shared: bool = False

    @classmethod
    def whole(cls, *shape: int) -> "Part":
        """What is the same on every rank."""
        n = math.prod(shape)
        return cls(0, n, n, shape, is_shared=True)

    @classmethod
    def of(cls, run: slice, total: int, dtype: torch.dtype | None = None) -> "Part":
        """A flat run."""
        return cls(run.start, run.stop, total, (run.stop - run.start,), dtype)

    @classmethod
    def like(cls, shard: Shard) -> "Part":
        """One number for each element of a parameter, where that lies."""
        return cls.of(slice(shard.start, shard.stop), shard.numel)


Parts: TypeAlias = Mapping[str, Union[Part, "Parts"]]
State: TypeAlias = dict[str, Union[Tensor, "State"]]


def zeros(parts: Parts, p: Tensor) -> State:
    """The state before the first step of a run ``p``, on its device."""
    return {
        key: torch.zeros(
            part.shape, dtype=part.dtype or passes.accumulator(p.dtype), device=p.device
        )
        if isinstance(part, Part)
        else zeros(part, p)
        for key, part in parts.items()
    }


def leaves(parts: Parts, *above: str) -> Iterator[tuple[tuple[str, ...], Part]]:
    """The parts and the keys that lead to them."""
    for key, part in parts.items():
        if isinstance(part, Part):
            yield (*above, key), part
        else:
            yield from leaves(part, *above, key)
