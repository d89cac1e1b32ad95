"""What a rule keeps of a parameter: a tensor's place in the whole parameter's state, and zeros.

A rule declares its state, ``state_spec(shard)``, as ``Part``s nested in dicts. Making it, counting
its bytes, saving it and laying it out anew for another number of ranks follow from that.
"""

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

import torch
from torch import Tensor

from ds_ext.ops.expressions import accumulator
from ds_ext.ops.shard import Shard


@dataclass(frozen=True)
class Part:
    """Elements ``[start, stop)``, on this rank, of the ``total`` that all ranks keep together.

    Ranks may keep the same elements, which then have the same values on them; what ``is_shared``
    lies whole on every rank. ``dtype`` None is the accumulator's of the parameter. ``is_stream``:
    see ``stream``.
    """

    start: int
    stop: int
    total: int
    shape: tuple[int, ...]  # in which the rank keeps them
    dtype: torch.dtype | None = None
    is_shared: bool = False
    is_stream: bool = False

    @classmethod
    def whole(cls, *shape: int) -> "Part":
        """What is the same on every rank."""
        n = math.prod(shape)
        return cls(0, n, n, shape, is_shared=True)

    @classmethod
    def stream(cls) -> "Part":
        """A number that tells a parameter's random numbers from those of others.

        It is kept, so that a run that is resumed draws the same ones whatever has changed of the
        order or the groups of parameters.
        """
        return cls(0, 1, 1, (), torch.int64, is_shared=True, is_stream=True)

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


def zeros(parts: Parts, p: Tensor, stream: int = 0) -> State:
    """The state before the first step of a run ``p``, on its device: zeros, but for streams.

    ``stream`` is the parameter's number; parts under further keys, as those of an expert, have
    streams of their own.
    """
    made: State = {}
    for key, part in parts.items():
        if isinstance(part, Part):
            dtype = part.dtype or accumulator(p.dtype)
            fill = stream if part.is_stream else 0
            made[key] = torch.full(part.shape, fill, dtype=dtype, device=p.device)
        else:
            made[key] = zeros(part, p, zlib.crc32(key.encode(), stream))
    return made


def leaves(parts: Parts, *above: str) -> Iterator[tuple[tuple[str, ...], Part]]:
    """The parts and the keys that lead to them."""
    for key, part in parts.items():
        if isinstance(part, Part):
            yield (*above, key), part
        else:
            yield from leaves(part, *above, key)


def nbytes(state: Any) -> int:
    """Bytes of all tensors in a state, nested in dicts and sequences."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        return sum(map(nbytes, state.values()))
    return sum(map(nbytes, state)) if isinstance(state, (list, tuple)) else 0
