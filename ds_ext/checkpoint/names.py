"""Names in checkpoints, which do not tell whether a model or its submodules were compiled."""

import re
from collections.abc import Mapping
from typing import Any

_COMPILED = re.compile(r"(?<![^.])_orig_mod\.")  # what torch.compile(module) calls the module


def plain(name: str) -> str:
    """Returns the name of a parameter or buffer in the model that is not compiled.

    ``"_orig_mod.layers.0._orig_mod.weight"`` -> ``"layers.0.weight"``.
    """
    return _COMPILED.sub("", name)


def with_plain_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a rank saved (see ``resharding.save``) under plain names."""
    accumulated = saved["accumulated"]
    return {
        **saved,
        "weights": by_plain_name(saved["weights"]),
        "state": by_plain_name(saved["state"]),
        "groups": [{**g, "params": list(map(plain, g["params"]))} for g in saved["groups"]],
        "accumulated": {**accumulated, "gradients": by_plain_name(accumulated["gradients"])},
    }


def by_plain_name(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same values under plain names."""
    return {plain(name): value for name, value in found.items()}
