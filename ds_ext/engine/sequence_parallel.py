"""Provides DeepSpeed with the groups of ranks that share sequences (Ulysses).

DeepSpeed reads the groups from an ``mpu``, such as its module ``parallel_state_sp``. If only the
config sets the groups, DeepSpeed either ignores them or (with ``data_parallel_size`` or
``mesh_param``) does not sum gradients over them. AutoTP drops the ``mpu`` of an engine.
"""

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups

from ds_ext.config.parsing import normalized
from ds_ext.distributed.groups import Group, everyone, of_ranks, size_of

_KEY = "sequence_parallel_size"
_ALONE = SimpleNamespace(get_model_parallel_world_size=lambda: 1, get_model_parallel_rank=lambda: 0)


class SequenceGroups:
    """An ``mpu`` with the groups of ranks that share sequences.

    DeepSpeed calls its methods ``get_…_group()``, ``get_…_world_size()`` and ``get_…_rank()``.

    Args:
        sequence: the ranks that share a sequence. They are consecutive in ``summed``.
        summed: the ranks that have the same weights and sum their gradients. They are the
            data-parallel group, over which DeepSpeed reduces. Its size and rank count sequences.
        others: an object with an ``mpu``'s methods for tensor parallelism.
    """

    def __init__(self, sequence: Group, summed: Group, others: Any) -> None:
        self._others = others
        size, ranks, rank = size_of(sequence), size_of(summed), dist.get_rank(summed)
        for kind, values in {
            "sequence_parallel": (sequence, size, dist.get_rank(sequence)),
            "sequence_data_parallel": (summed, ranks, rank),
            "data_parallel": (summed, ranks // size, rank // size),
        }.items():
            for name, value in zip(("group", "world_size", "rank"), values, strict=True):
                setattr(self, f"get_{kind}_{name}", lambda value=value: value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)


def reset() -> None:
    """Removes groups of an earlier engine of ours from DeepSpeed: the next engine has its own."""
    if isinstance(groups.mpu, SequenceGroups):
        groups.mpu = None


def add_groups(engine: DeepSpeedEngine, given: Any) -> None:
    """Sets an engine's ``mpu`` to one with sequence groups, if only its config sets them.

    The engine has not created its groups yet. AutoTP may have dropped the ``given`` mpu.

    Raises:
        ValueError: on all ranks, if sizes do not match.
    """
    asked = normalized(engine._config._param_dict).get(_KEY, 1)
    size = getattr(given, "get_sequence_parallel_world_size", lambda: 1)()
    mesh, tensor_size = engine.mesh_device, max(1, engine.autotp_size())
    if tensor_size > 1 and (size > 1 or mesh is not None):
        raise ValueError(
            f"tensor_parallel.autotp_size = {tensor_size}: sequence parallelism from mpu, "
            "mesh_param or data_parallel_size is not supported with AutoTP. Remove these, and set "
            f'"{_KEY}" in the config.'
        )
    if given is not None and asked not in (1, size):
        raise ValueError(
            f"{_KEY} = {asked}, but the mpu's sequences have {size} ranks: remove one of them."
        )
    if mesh is not None and size == 1:
        engine.mpu = _of_mesh(mesh, given or _ALONE)
    elif size == 1 and asked != 1:
        engine.mpu = _made(asked, tensor_size)


def _of_mesh(mesh: Any, others: Any) -> SequenceGroups:
    """The groups from DeepSpeed's mesh of data and sequence parallelism."""
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"data_parallel_size times {_KEY}, or mesh_param, is {mesh.size()}, but there are "
            f"{dist.get_world_size()} ranks."
        )
    return SequenceGroups(mesh.get_group(mesh_dim="sequence_parallel"), everyone(), others)


def _made(size: int, tensor_size: int) -> SequenceGroups:
    """Groups of ``size`` consecutive ranks among the ranks that have the same weights."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % (size * tensor_size):
        beside = f" times tensor_parallel.autotp_size = {tensor_size}" if tensor_size > 1 else ""
        raise ValueError(f"{_KEY} = {size}{beside} does not divide the {world} ranks.")
    others = groups if tensor_size > 1 else _ALONE
    summed = groups.get_data_parallel_group() if tensor_size > 1 else everyone()
    ranks = list(range(rank % tensor_size, world, tensor_size))
    first = ranks.index(rank) // size * size
    return SequenceGroups(of_ranks(tuple(ranks[first : first + size])), summed, others)
