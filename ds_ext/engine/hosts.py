"""How many ranks run on a host, as launchers tell it."""

import os


def num_ranks(key: str, value: object) -> int:
    """Returns the ranks of this host.

    Args:
        key: the setting that asks for it.
        value: what it is set to.

    Raises:
        ValueError: where no launcher has told it.
    """
    told = next(filter(None, map(os.environ.get, ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))), None)
    if told is None:
        raise ValueError(
            f"{key} = {value!r}: neither LOCAL_WORLD_SIZE nor LOCAL_SIZE, which launchers set and "
            "which tell the number of ranks of a host, is in the environment: set LOCAL_WORLD_SIZE."
        )
    return int(told)
