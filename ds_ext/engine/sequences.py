"""Which ranks share sequences (Ulysses), told to DeepSpeed where it would leave some of them out.

DeepSpeed asks an ``mpu`` for them, such as its module ``parallel_state_sp``. Told by the config
alone it adds up no gradients of a sequence's ranks (with ``data_parallel_size``, or
``mesh_param``), or knows nothing of them; and AutoTP drops the ``mpu`` that an engine was given.
"""

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups

from ds_ext.config.refused import without_auto
from ds_ext.distributed.groups import of_ranks
from ds_ext.distributed.placement import Group, everyone, size_of

_KEY = "sequence_parallel_size"
_ALONE = SimpleNamespace(get_model_parallel_world_size=lambda: 1, get_model_parallel_rank=lambda: 0)


class SequenceGroups:
    """An ``mpu`` that knows which ranks share sequences.

    Args:
        sequence: the ranks that have parts of the same sequences; they follow each other in
            ``summed``.
        summed: the ranks over which gradients are added up, which have the same weights.
        others: answers what DeepSpeed asks of tensor parallelism.
    """

    def __init__(self, sequence: Group, summed: Group, others: Any) -> None:
        self._sequence, self._summed, self._others = sequence, summed, others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)

    def get_sequence_parallel_group(self) -> Group:
        """The ranks that have parts of the same sequences."""
        return self._sequence

    def get_sequence_parallel_world_size(self) -> int:
        """How many they are."""
        return size_of(self._sequence)

    def get_sequence_parallel_rank(self) -> int:
        """Which part this rank has."""
        return dist.get_rank(self._sequence)

    def get_sequence_data_parallel_group(self) -> Group:
        """The ranks over which gradients are added up."""
        return self._summed

    def get_sequence_data_parallel_world_size(self) -> int:
        """How many they are."""
        return size_of(self._summed)

    def get_sequence_data_parallel_rank(self) -> int:
        """This rank's number among them."""
        return dist.get_rank(self._summed)

    def get_data_parallel_group(self) -> Group:
        """The ranks over which gradients are added up: here too, DeepSpeed has no other group."""
        return self._summed

    def get_data_parallel_world_size(self) -> int:
        """How many ranks have sequences of their own."""
        return size_of(self._summed) // size_of(self._sequence)

    def get_data_parallel_rank(self) -> int:
        """Whose sequences this rank has a part of."""
        return dist.get_rank(self._summed) // size_of(self._sequence)


def forget() -> None:
    """Makes DeepSpeed forget the sequences of an engine before this one."""
    if isinstance(groups.mpu, SequenceGroups):
        groups.mpu = None


def complete(engine: DeepSpeedEngine, given: Any) -> None:
    """Gives an engine an ``mpu`` that knows of sequences, where it was to be told by its config.

    Args:
        engine: before it asks for its groups.
        given: the ``mpu`` that the engine was made with, which AutoTP may have dropped.

    Raises:
        ValueError: for sizes that do not fit; on all ranks alike.
    """
    asked = without_auto(engine._config._param_dict).get(_KEY, 1)
    size = getattr(given, "get_sequence_parallel_world_size", lambda: 1)()
    mesh, tensor_size = engine.mesh_device, max(1, engine.autotp_size())
    if tensor_size > 1 and (size > 1 or mesh is not None):
        raise ValueError(
            f"tensor_parallel.autotp_size = {tensor_size}: ranks that have to share a sequence by "
            "mpu, mesh_param or data_parallel_size hold different parts of the weights. Leave "
            f'these out, and write "{_KEY}" into the config.'
        )
    if given is not None and asked not in (1, size):
        raise ValueError(
            f"{_KEY} = {asked}, but the mpu's sequences have {size} ranks: leave one of them out."
        )
    if mesh is not None and size == 1:
        engine.mpu = _of_mesh(mesh, given or _ALONE)
    elif size == 1 and asked != 1:
        engine.mpu = _made(asked, tensor_size)


def _of_mesh(mesh: Any, others: Any) -> SequenceGroups:
    """The groups of DeepSpeed's mesh of data and sequences."""
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"data_parallel_size times {_KEY}, or mesh_param, is {mesh.size()}, but there are "
            f"{dist.get_world_size()} ranks."
        )
    return SequenceGroups(mesh.get_group(mesh_dim="sequence_parallel"), everyone(), others)


def _made(size: int, tensor_size: int) -> SequenceGroups:
    """The groups of ``size`` ranks that follow each other among those with the same weights."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % (size * tensor_size):
        beside = f" times tensor_parallel.autotp_size = {tensor_size}" if tensor_size > 1 else ""
        raise ValueError(f"{_KEY} = {size}{beside} does not divide the {world} ranks.")
    others = groups if tensor_size > 1 else _ALONE
    summed = groups.get_data_parallel_group() if tensor_size > 1 else everyone()
    ranks = list(range(rank % tensor_size, world, tensor_size))
    first = ranks.index(rank) // size * size
    return SequenceGroups(of_ranks(tuple(ranks[first : first + size])), summed, others)
