"""How many ranks run on a host, as launchers tell it."""

import os

from ds_ext.distributed import consensus


def num_ranks(key: str, value: object) -> int:
    """Returns the ranks of each host. All ranks call it.

    Args:
        key: the setting that asks for it.
        value: what it is set to.

    Raises:
        ValueError: on all ranks, where no launcher has told it to one, or hosts have different
            numbers of ranks.
    """
    variables = map(os.environ.get, ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))
    told = consensus.gathered(next(filter(None, variables), ""))
    if not all(told):
        raise ValueError(
            f"{key} = {value!r}: neither LOCAL_WORLD_SIZE nor LOCAL_SIZE, which launchers set and "
            "which tell the number of ranks of a host, is in the environment: set LOCAL_WORLD_SIZE."
        )
    if len(set(told)) > 1:
        raise ValueError(
            f"{key} = {value!r} needs the same number of ranks on each host, but "
            f"LOCAL_WORLD_SIZE is {', '.join(dict.fromkeys(told))}: start as many on each."
        )
    return int(told[0])
