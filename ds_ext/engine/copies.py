"""ZeRO among groups of ranks, each of which holds a copy (after MiCS, arXiv 2205.00119).

DeepSpeed had this as ``mics_shard_size`` until 0.19.8 removed it. What is left of it there is that
``zero.Init`` cuts a model among a group of ranks that it is given; what it sends from one rank to
all, it then sends within that group, so copies are told before.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from torch import Tensor

from ds_ext.config import gradients
from ds_ext.distributed import groups
from ds_ext.distributed.placement import Group, broadcast, everyone, size_of

KEY = "ds_ext.shard_size"


class Cut(NamedTuple):
    """The ranks among which ZeRO cuts."""

    shards: Group  # hold one copy together
    copies: Group = None  # hold the same part of each copy; None if there is one copy


_of_shards: dict[Any, Cut] = {}  # those that were made, by their first group


def shard_size(config: Any, mpu: Any = None) -> int:
    """Returns how many ranks hold one copy by a DeepSpeed config; 0: all.

    Args:
        config: a dictionary, the path of a file, or None.
        mpu: what DeepSpeed is told of model parallelism.
    """
    if config is None:
        return 0
    if not isinstance(config, dict):
        config = DeepSpeedConfig(config, mpu)._param_dict
    return gradients.section_of(config).shard_size


def cut(group: Group, size: int) -> Cut:
    """Returns among which ranks of ``group`` this one's copy is cut; all of them ask alike.

    Raises:
        ValueError: if ``size`` does not divide their number.
    """
    ranks = size_of(group)
    if size in (0, ranks):
        return Cut(group)
    if ranks % size:
        raise ValueError(
            f"{KEY} = {size} does not divide the {ranks} ranks of data parallelism: set it to a "
            "divisor, or remove it."
        )
    shards, copies = groups.divided(group, size)
    made = Cut(shards or groups.alone(), copies)
    _of_shards[made.shards] = made
    return made


def group_for(config: Any, mpu: Any) -> Group:
    """Returns the ranks among which ``zero.Init`` is to cut by a config, None for all."""
    size = shard_size(config, mpu)
    if not size:
        return None
    deepspeed.init_distributed()  # as zero.Init does
    return cut(everyone(), size).shards


def refuse_other_cut(params: Iterable[tuple[str, Tensor]], wanted: Cut) -> None:
    """Checks that what is partitioned already is so among the ranks of a cut.

    Raises:
        ValueError: if it is not.
    """
    for name, param in params:
        group = getattr(param, "ds_process_group", None)
        is_ours = wanted.copies is not None or group in _of_shards
        if group is not None and is_ours and group is not wanted.shards:
            raise ValueError(
                f"{KEY} = {size_of(wanted.shards)}, but {name} is cut among {size_of(group)} ranks "
                "already: give deepspeed.zero.Init the same config (config_dict_or_path), or load "
                "the model anew."
            )


def size_for(params: Iterable[Tensor]) -> int:
    """Returns among how many ranks parameters are cut of which there are copies, 0 if none are."""
    cuts = (_of_shards.get(getattr(param, "ds_process_group", None)) for param in params)
    return max((size_of(found.shards) for found in cuts if found), default=0)


def tell_copies(param: Tensor, shards: Group, rank: int) -> None:
    """Sends a whole parameter from one rank of all to the others, if there are copies of it.

    Args:
        param: the parameter, not partitioned.
        shards: the ranks among which it is, or will be, cut.
        rank: of all ranks.
    """
    if shards in _of_shards:
        broadcast(param.data, rank, everyone())
