"""Groups of ranks that each hold one replica of the ZeRO partitions (MiCS, arXiv 2205.00119).

DeepSpeed removed its own setting, ``mics_shard_size``, in 0.19.8. ``zero.Init`` can still partition
a model among a given group of ranks, but it broadcasts parameters only within that group. This
module therefore broadcasts them to all replicas first.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from torch import Tensor

from ds_ext.config import parsing
from ds_ext.distributed import groups
from ds_ext.distributed.groups import Group, everyone, size_of
from ds_ext.distributed.placement import broadcast

KEY = "ds_ext.shard_size"


class ReplicaGroups(NamedTuple):
    """The groups of this rank."""

    shards: Group  # the ranks that hold one replica together
    replicas: Group = None  # the ranks that hold the same part; None if there is one replica


_of_shards: dict[Any, ReplicaGroups] = {}  # all groups of this process, by their ``shards``


def shard_size(config: Any, mpu: Any = None) -> int:
    """Returns the number of ranks that hold one replica; 0 for all ranks.

    The config is a dictionary, the path of a file, or None.
    """
    if config is None:
        return 0
    if not isinstance(config, dict):
        config = DeepSpeedConfig(config, mpu)._param_dict
    return parsing.section(config).shard_size


def split_ranks(group: Group, size: int) -> ReplicaGroups:
    """Divides a group into replicas of ``size`` ranks (0: all). All its ranks must call it.

    Raises:
        ValueError: ``size`` does not divide the number of ranks.
    """
    ranks = size_of(group)
    if size in (0, ranks):
        return ReplicaGroups(group)
    if ranks % size:
        raise ValueError(
            f"{KEY} = {size} does not divide the {ranks} ranks of data parallelism: set it to a "
            "divisor, or remove it."
        )
    shards, replicas = groups.divided(group, size)
    made = ReplicaGroups(shards or groups.alone(), replicas)
    _of_shards[made.shards] = made
    return made


def shard_group_for(config: Any, mpu: Any) -> Group:
    """Returns the ranks among which ``zero.Init`` must partition a model; None for all ranks."""
    size = shard_size(config, mpu)
    if not size:
        return None
    deepspeed.init_distributed()  # as zero.Init does
    return split_ranks(everyone(), size).shards


def refuse_other_groups(params: Iterable[tuple[str, Tensor]], wanted: ReplicaGroups) -> None:
    """Checks that parameters are either not partitioned, or partitioned among the wanted ranks.

    Raises:
        ValueError: a parameter is partitioned among other ranks.
    """
    for name, param in params:
        group = getattr(param, "ds_process_group", None)
        is_ours = wanted.replicas is not None or group in _of_shards
        if group is not None and is_ours and group is not wanted.shards:
            raise ValueError(
                f"{KEY} = {size_of(wanted.shards)}, but {name} is already partitioned among "
                f"{size_of(group)} ranks: pass the same config to deepspeed.zero.Init "
                "(config_dict_or_path), or load the model again."
            )


def replicated_shard_size(params: Iterable[Tensor]) -> int:
    """Returns the number of ranks that hold one replica of the parameters; 0 without replicas."""
    found = (_of_shards.get(getattr(param, "ds_process_group", None)) for param in params)
    return max((size_of(own.shards) for own in found if own), default=0)


def broadcast_to_replicas(param: Tensor, shards: Group, rank: int) -> None:
    """Broadcasts a full parameter from a global rank to all, if ``shards`` have replicas."""
    if shards in _of_shards:
        broadcast(param.data, rank, everyone())
