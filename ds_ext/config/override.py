"""``python -m ds_ext run --config FILE``: the optimizer of FILE replaces the program's own.

For programs that write their DeepSpeed config in code, as OpenRLHF does. Only a config that names
an optimizer is changed: engines that do not train have none.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "DS_EXT_CONFIG"  # set by ``run --config``, the path of FILE


def apply(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a program's config with the section "optimizer" of FILE, and "ds_ext" if it has one.

    A value "auto" in FILE's ``optimizer.params`` means the value that the program's own config has
    under the same key.

    Args:
        config: the DeepSpeed config that the program passes to ``deepspeed.initialize``.

    Raises:
        ValueError: FILE says "auto" for a parameter that the program does not set.
    """
    path = os.environ.get(VARIABLE)
    if not path or not isinstance(config, dict) or "optimizer" not in config:
        return config
    given = _read(path)
    own = config["optimizer"].get("params", {})
    params = dict(given["optimizer"].get("params", {}))
    for key in [key for key, value in params.items() if value == "auto"]:
        if own.get(key, "auto") == "auto":
            raise ValueError(
                f'run --config {path}: optimizer.params.{key} is "auto", and the program sets no '
                f"{key}. Write a number."
            )
        params[key] = own[key]
    section = {"ds_ext": given["ds_ext"]} if "ds_ext" in given else {}
    return config | section | {"optimizer": given["optimizer"] | {"params": params}}


def refuse_object(optimizer: object) -> None:
    """Raises ValueError if the program makes its optimizer itself, which no config replaces.

    Args:
        optimizer: what the program passes to ``deepspeed.initialize``, or None.
    """
    path = os.environ.get(VARIABLE)
    if path and optimizer is not None:
        raise ValueError(
            f"run --config {path}: the program passes {type(optimizer).__name__} to "
            "deepspeed.initialize itself, so the config's optimizer would be ignored. Leave "
            "--config out, and name the optimizer where the program takes a DeepSpeed config."
        )


@functools.cache
def _read(path: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(Path(path).read_text())
    return read
