"""Decides whether a config's "type" names an optimizer of ds_ext, of DeepSpeed or of torch."""

import difflib
import sys
from typing import Any

import torch

from ds_ext.config import parsing
from ds_ext.rules.base import REGISTRY, key_of, named

PREFIX = "ds_ext."  # optional before the name of any ds_ext optimizer in a config
# Used if DeepSpeed is not imported.
_DEEPSPEEDS = frozenset("adagrad adam adamw lamb lion muadam muadamw muon musgd".split())
# Names of other libraries that mean ours without the prefix, and what they would name.
TAKEN_OVER = {
    "adafactor": "torch.optim's, whose state DeepSpeed leaves full-sized and unfactored",
    "lamb": "DeepSpeed's FusedLamb",
}


def deepspeeds() -> frozenset[str]:
    """Returns the names of DeepSpeed's optimizers, of the imported version if there is one."""
    module = sys.modules.get("deepspeed.runtime.config")
    return frozenset(getattr(module, "DEEPSPEED_OPTIMIZERS", _DEEPSPEEDS))


def registry_key(name: str | None) -> str | None:
    """Returns the key in ``OPTIMIZERS`` for a config's type, or None if ds_ext does not own it."""
    key = key_of(name or "")
    is_theirs = key == (name or "").lower() and key in deepspeeds() - TAKEN_OVER.keys()
    return key if key in REGISTRY and not is_theirs else None


def in_config(name: str) -> str:
    """Returns a ds_ext optimizer's name with the prefix, if a config needs it."""
    return name if registry_key(name) else PREFIX + name


def concerns_us(config: Any) -> bool:
    """Returns whether a config, as given to DeepSpeed, has a section or an optimizer of ds_ext."""
    try:
        config = parsing.load(config)
    except ValueError:  # DeepSpeed reports it
        return False
    if not isinstance(config, dict):
        return False
    section = config.get("optimizer")
    section = section if isinstance(section, dict) else {"type": section}
    is_text = isinstance(section.get("type", ""), str | None)  # DeepSpeed's error names no key
    is_named = not is_text or _names_ours(section)
    return is_named or "ds_ext" in config or bool(misspelt_sections(config))


def misspelt_sections(config: dict[str, Any]) -> dict[str, str]:
    """Returns the top-level keys of a config that are meant to be "ds_ext" or "optimizer"."""
    found = {}
    for key, section in config.items():
        if key != "ds_ext" and difflib.get_close_matches(key.lower(), ["ds_ext"], cutoff=0.8):
            found[key] = "ds_ext"
        elif "optimizer" not in config and difflib.get_close_matches(key.lower(), ["optimizer"]):
            if isinstance(section, dict) and _names_ours(section):
                found[key] = "optimizer"
    return found


def _names_ours(section: dict[str, Any]) -> bool:
    """Whether a section names an optimizer of ds_ext, by "type" or by a misspelling of it."""
    names = section.get("type", [*section.values()])
    names = names if isinstance(names, list) else [names]  # a list is refused later
    return any(isinstance(name, str) and registry_key(name) for name in names)


def refuse_misspelled(name: str) -> None:
    """Raises ValueError for an unknown type that is similar to a name of ours.

    Any other unknown type is an error of DeepSpeed, whose engine it is.
    """
    near = difflib.get_close_matches(key_of(name), [*REGISTRY, *deepspeeds()], n=1)
    if name.lower().startswith(PREFIX) or (near and near[0] in REGISTRY):
        refuse_unknown(name)


def refuse_unknown(name: str) -> None:
    """Raises ValueError if neither ds_ext, DeepSpeed nor torch has an optimizer of this name."""
    theirs = deepspeeds()
    if not (name.lower() in theirs or registry_key(name) or hasattr(torch.optim, name)):
        named(name, theirs=theirs)
