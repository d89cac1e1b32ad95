"""``python -m ds_ext run --config FILE``: replaces a program's optimizer with FILE's optimizer.

Use it for programs that create their DeepSpeed config in code, such as OpenRLHF. Configs without an
optimizer do not change, because their engines do not train.
"""

import functools
import os
from pathlib import Path
from typing import Any

from ds_ext.config import parsing

VARIABLE = "DS_EXT_CONFIG"  # the path of FILE, set by ``run --config``


def apply(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a program's config with FILE's section "optimizer" and, if present, "ds_ext".

    A value "auto" in FILE's ``optimizer.params`` takes the value from the program's own config.

    Args:
        config: the DeepSpeed config that the program passes to ``deepspeed.initialize``.

    Raises:
        ValueError: FILE has "auto" for a parameter that the program does not set.
    """
    path = os.environ.get(VARIABLE)
    if not path or not isinstance(config, dict) or "optimizer" not in config:
        return config
    file = _read(path)
    own = config["optimizer"].get("params") or {}
    params = dict(file["optimizer"].get("params") or {})
    for key in [key for key, value in params.items() if value == "auto"]:
        if own.get(key, "auto") == "auto":
            raise ValueError(
                f'run --config {path}: optimizer.params.{key} is "auto", and the program sets no '
                f"{key}. Write a number."
            )
        params[key] = own[key]
    section = {"ds_ext": file["ds_ext"]} if "ds_ext" in file else {}
    return config | section | {"optimizer": file["optimizer"] | {"params": params}}


def refuse_object(optimizer: object) -> None:
    """Checks that the program passes no optimizer object, which a config cannot replace.

    Args:
        optimizer: the optimizer that the program passes to ``deepspeed.initialize``, or None.

    Raises:
        ValueError: ``run --config`` is in use, and ``optimizer`` is not None.
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
    config: dict[str, Any] = parsing.load(Path(path))
    for problem in parsing.malformed(config):
        raise ValueError(f"run --config {path}: {problem}")
    return config
