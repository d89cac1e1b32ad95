"""Describes the state that a rule keeps of a parameter, and creates it.

A rule declares its state, ``state_spec(shard)``, as ``Part``s nested in dicts. Creating it,
counting its bytes, saving it and resharding it for another number of ranks follow from that.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

import torch
from torch import Tensor

from ds_ext.ops.expressions import accumulator
from ds_ext.ops.shard import Shard


@dataclass(frozen=True)
class Part:
    """This rank's elements ``[start, stop)`` of the ``total`` elements on all ranks.

    Ranks that keep the same elements have the same values. If ``is_shared``, every rank has all
    elements. ``dtype`` None is the accumulator's for the parameter. ``is_stream``: see ``stream``.
    ``is_cache``: see ``cache``.
    """

    start: int
    stop: int
    total: int
    shape: tuple[int, ...]  # of the rank's tensor
    dtype: torch.dtype | None = None
    is_shared: bool = False
    is_stream: bool = False
    is_cache: bool = False

    @classmethod
    def whole(cls, *shape: int) -> "Part":
        """A tensor that is the same on every rank."""
        n = math.prod(shape)
        return cls(0, n, n, shape, is_shared=True)

    @classmethod
    def stream(cls) -> "Part":
        """A number that distinguishes the random numbers of parameters.

        It is saved, so that a resumed run draws the same random numbers even if the order or the
        groups of parameters have changed.
        """
        return cls(0, 1, 1, (), torch.int64, is_shared=True, is_stream=True)

    @classmethod
    def cache(cls, *shape: int) -> "Part":
        """A tensor that the rule can compute again, in a dtype that it chooses.

        It counts as bf16 if the weights are bf16. No checkpoint and no state dict contains it.
        After a load it is missing until the rule computes it.
        """
        n = math.prod(shape)
        return cls(0, n, n, shape, is_cache=True)

    @classmethod
    def of(cls, run: slice, total: int, dtype: torch.dtype | None = None) -> "Part":
        """A flat run."""
        return cls(run.start, run.stop, total, (run.stop - run.start,), dtype)

    @classmethod
    def like(cls, shard: Shard, dtype: torch.dtype | None = None) -> "Part":
        """One number per element of a parameter, sharded as the parameter is."""
        return cls.of(slice(shard.start, shard.stop), shard.numel, dtype)

    def dtype_for(self, weights: torch.dtype) -> torch.dtype:
        """Returns the dtype of the tensor for weights of a dtype."""
        if self.is_cache and weights == torch.bfloat16:
            return weights
        return self.dtype or accumulator(weights)


Parts: TypeAlias = Mapping[str, Union[Part, "Parts"]]
State: TypeAlias = dict[str, Any]  # tensors by key, nested as a rule's ``state_spec``
NestedState: TypeAlias = dict[str, Union[Tensor, "NestedState"]]


def zeros(parts: Parts, p: Tensor, stream: int = 0) -> NestedState:
    """The state of a run ``p`` before its first step, on its device: zeros, except for streams.

    ``stream`` is the parameter's number. Nested parts, such as those of an expert, get their own.
    """
    made: NestedState = {}
    for key, part in parts.items():
        if isinstance(part, Part):
            fill, dtype = stream if part.is_stream else 0, part.dtype_for(p.dtype)
            made[key] = torch.full(part.shape, fill, dtype=dtype, device=p.device)
        else:
            made[key] = zeros(part, p, zlib.crc32(key.encode(), stream))
    return made


def saved(parts: Parts) -> Parts:
    """Returns the parts that checkpoints contain: all except caches."""
    return {
        key: part if isinstance(part, Part) else saved(part)
        for key, part in parts.items()
        if not (isinstance(part, Part) and part.is_cache)
    }


class StateMismatch(Exception):
    """Says how a state differs from what its rule declares."""


def without_caches(state: State, parts: Parts) -> State:
    """Returns a state, nested in dicts as ``parts`` are, without the caches that they declare.

    Raises:
        StateMismatch: the state is not nested as ``parts`` are.
    """
    found: State = {}
    for key, x in state.items():
        part = parts.get(key)
        if part is not None and isinstance(part, Mapping) != isinstance(x, Mapping):
            raise StateMismatch(f"its kind of {key} is that of another hyper-parameter")
        if isinstance(part, Mapping):
            found[key] = without_caches(x, part)
        elif part is None or not part.is_cache:
            found[key] = x
    return found


def leaves(parts: Mapping[str, Any], *above: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields all parts, or the values of a state, with their paths of keys."""
    for key, part in parts.items():
        if isinstance(part, Mapping):
            yield from leaves(part, *above, key)
        else:
            yield (*above, key), part


def changed(
    tree: Mapping[str, Any], change: Callable[[tuple[str, ...], Any], object], *above: str
) -> State:
    """A copy of a state, or of parts, with ``change`` of each path of keys and its value."""
    return {
        key: changed(x, change, *above, key) if isinstance(x, Mapping) else change((*above, key), x)
        for key, x in tree.items()
    }


def mapped(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a state, nested in dicts, with ``change`` of each tensor."""
    if isinstance(state, Mapping):
        return {key: mapped(inner, change) for key, inner in state.items()}
    return change(state) if isinstance(state, Tensor) else state


def nbytes(state: Any) -> int:
    """The bytes of all tensors in a state, nested in dicts and sequences."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        return sum(map(nbytes, state.values()))
    return sum(map(nbytes, state)) if isinstance(state, (list, tuple)) else 0
