"""Creates models by name on the device "meta": known models, and any that transformers can read."""

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Configurations as published with the weights, with the keys of config.json. Missing keys have
# transformers' defaults. Gemma 3's configurations omit the vision tower. "removed" has the Hub
# names of models that earlier versions knew.
_DATA = json.loads((Path(__file__).parent / "models.json").read_text(encoding="utf-8"))
KNOWN: dict[str, dict[str, Any]] = _DATA["known"]
REMOVED: dict[str, str] = _DATA["removed"]
# Suffixes of Hub names after the architecture.
_ENDINGS = re.compile(r"[-_.](instruct|it|chat|base|pt|hf|v\d[\d.]*|\d{4})$")


def known(name: str) -> str | None:
    """Returns the key in ``KNOWN`` for a name in any spelling, or None.

    "qwen3-8B", "Qwen 3 8B" and "Qwen/Qwen3-8B-Base" give "qwen3-8b".
    """
    wanted = name.lower().rsplit("/", 1)[-1]
    while (shorter := _ENDINGS.sub("", wanted)) != wanted:
        if _plain(wanted) in _PLAIN:
            break
        wanted = shorter
    return _PLAIN.get(_plain(wanted))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_PLAIN = {_plain(name): name for name in KNOWN}
_PLAIN |= {_plain(name): same for name, same in _DATA["same_shapes"].items()}


def config(model: str) -> Any:
    """Returns the transformers config that ``--model`` names.

    Args:
        model: a folder, a config.json, a known name, or a name on the Hub.

    Raises:
        ValueError: there is no such model, or transformers is missing.
    """
    is_path = os.path.exists(model)
    name = None if is_path else known(model)
    if name is None and not is_path and "/" not in model:
        hub = {_plain(name): hub for name, hub in REMOVED.items()}.get(_plain(model))
        if hub is not None:
            raise ValueError(f"--model {model} is no longer built in: use its Hub name, {hub}.")
        near = difflib.get_close_matches(_plain(model), _PLAIN, n=3, cutoff=0.5)
        guess = " or ".join(dict.fromkeys(_PLAIN[x] for x in near))
        hint = f" Did you mean {guess}?" if guess else ""
        raise ValueError(
            f"--model {model}: no such folder or file, and no known model.{hint} Known: "
            f"{', '.join(KNOWN)}."
        )
    try:
        import transformers
    except ImportError:
        raise ValueError(
            f"--model {model}: reading it needs transformers (pip install ds-ext[hf])."
        ) from None
    try:
        if name is not None:
            return transformers.AutoConfig.for_model(**KNOWN[name])
        return transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--model {model}: no configuration of transformers: {error}") from None


def build(config: Any, **options: Any) -> nn.Module:
    """Returns the model of a config on the current default device.

    Args:
        config: a config of transformers.
        **options: arguments of ``from_config``, such as ``dtype`` and ``attn_implementation``.
    """
    import transformers

    built: nn.Module
    try:
        built = transformers.AutoModelForCausalLM.from_config(config, **options)
    except ValueError:  # not a language model
        built = transformers.AutoModel.from_config(config, **options)
    return built


def skeleton(config: Any) -> nn.Module:
    """Returns the model of a config on the device "meta"."""
    with torch.device("meta"):
        return build(config)
