"""Creates models by name on the device "meta": known models, and any that transformers can read."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_ext.hyperparams import did_you_mean

# Configurations as published with the weights, with the keys of config.json. Missing keys have
# transformers' defaults. Gemma 3's configurations omit the vision tower. "removed" has the Hub
# names of models that earlier versions knew.
_DATA = json.loads((Path(__file__).parent / "models.json").read_text(encoding="utf-8"))
KNOWN: dict[str, dict[str, Any]] = _DATA["known"]
REMOVED: dict[str, str] = _DATA["removed"]


def config(model: str) -> Any:
    """Returns the transformers config that ``--model`` names; ValueError if there is none.

    Args:
        model: a folder, a config.json, a known name in any case, or a name on the Hub.
    """
    name = model.lower()
    if os.path.exists(model) or "/" in model:
        name = ""
    elif name in REMOVED:
        hub = REMOVED[name]
        raise ValueError(f"--model {model} is no longer built in: use its Hub name, {hub}.")
    elif name not in KNOWN:
        raise ValueError(
            f"--model {model}: no such folder or file, and no known model."
            f"{did_you_mean(name, KNOWN)} Known: {', '.join(KNOWN)}."
        )
    try:
        import transformers
    except ImportError:
        what = "reading it needs transformers (pip install ds-ext[hf])"
        raise ValueError(f"--model {model}: {what}.") from None
    try:
        if name:
            return transformers.AutoConfig.for_model(**KNOWN[name])
        return transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--model {model}: no configuration of transformers: {error}") from None


def build(config: Any, **options: Any) -> nn.Module:
    """Returns the model of a config of transformers on the current default device.

    ``options`` are arguments of ``from_config``, such as ``dtype`` and ``attn_implementation``.
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
