"""Creates models by name on the device "meta": known models, and any that transformers can read."""

import difflib
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

# Configurations as published with the weights, with the keys of config.json. Missing keys have
# transformers' defaults. Gemma 3's configurations omit the vision tower.
_LLAMA_2 = {"model_type": "llama", "vocab_size": 32000}
_LLAMA_3 = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
_QWEN_3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
_GEMMA_3 = {"model_type": "gemma3_text", "vocab_size": 262208, "head_dim": 256}
_MISTRAL = {"model_type": "mistral", "vocab_size": 131072, "num_key_value_heads": 8}
_MIXTRAL = {"model_type": "mixtral", "num_key_value_heads": 8, "num_local_experts": 8}


def _sizes(width: int, inner: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


_TIED = {"tie_word_embeddings": True}
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": {**_LLAMA_2, "vocab_size": 49152, "num_key_value_heads": 3}
    | _sizes(576, 1536, 30, 9)
    | _TIED,
    "tinyllama-1.1b": _LLAMA_2 | {"num_key_value_heads": 4} | _sizes(2048, 5632, 22, 32),
    "llama-2-7b": _LLAMA_2 | _sizes(4096, 11008, 32, 32),
    "llama-2-13b": _LLAMA_2 | _sizes(5120, 13824, 40, 40),
    "llama-65b": _LLAMA_2 | _sizes(8192, 22016, 80, 64),
    "llama-2-70b": _LLAMA_2 | {"num_key_value_heads": 8} | _sizes(8192, 28672, 80, 64),
    "llama-3.2-1b": _LLAMA_3 | _sizes(2048, 8192, 16, 32) | _TIED,
    "llama-3.2-3b": _LLAMA_3 | _sizes(3072, 8192, 28, 24) | _TIED,
    "llama-3.1-8b": _LLAMA_3 | _sizes(4096, 14336, 32, 32),
    "llama-3.3-70b": _LLAMA_3 | _sizes(8192, 28672, 80, 64),
    "qwen3-0.6b": _QWEN_3 | _sizes(1024, 3072, 28, 16) | _TIED,
    "qwen3-1.7b": _QWEN_3 | _sizes(2048, 6144, 28, 16) | _TIED,
    "qwen3-4b": _QWEN_3 | _sizes(2560, 9728, 36, 32) | _TIED,
    "qwen3-8b": _QWEN_3 | _sizes(4096, 12288, 36, 32),
    "qwen3-14b": _QWEN_3 | _sizes(5120, 17408, 40, 40),
    "qwen3-32b": _QWEN_3 | _sizes(5120, 25600, 64, 64),
    "qwen3-30b-a3b": _QWEN_3
    | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "moe_intermediate_size": 768}
    | {"num_experts": 128, "num_experts_per_tok": 8}
    | _sizes(2048, 6144, 48, 32),
    "gemma-3-270m": _GEMMA_3
    | {"vocab_size": 262144, "num_key_value_heads": 1}
    | _sizes(640, 2048, 18, 4),
    "gemma-3-1b": _GEMMA_3
    | {"vocab_size": 262144, "num_key_value_heads": 1}
    | _sizes(1152, 6912, 26, 4),
    "gemma-3-4b": _GEMMA_3 | {"num_key_value_heads": 4} | _sizes(2560, 10240, 34, 8),
    "gemma-3-12b": _GEMMA_3 | {"num_key_value_heads": 8} | _sizes(3840, 15360, 48, 16),
    "gemma-3-27b": _GEMMA_3
    | {"num_key_value_heads": 16, "head_dim": 128}
    | _sizes(5376, 21504, 62, 32),
    "mistral-7b": _MISTRAL | {"vocab_size": 32000} | _sizes(4096, 14336, 32, 32),
    "mistral-nemo-12b": _MISTRAL | {"head_dim": 128} | _sizes(5120, 14336, 40, 32),
    "mistral-small-24b": _MISTRAL | {"head_dim": 128} | _sizes(5120, 32768, 40, 32),
    "mixtral-8x7b": _MIXTRAL | {"vocab_size": 32000} | _sizes(4096, 14336, 32, 32),
    "mixtral-8x22b": _MIXTRAL | {"vocab_size": 32768} | _sizes(6144, 16384, 56, 48),
    "deepseek-v2-lite": {"model_type": "deepseek_v2", "vocab_size": 102400}
    | {"moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2}
    | {"num_experts_per_tok": 6, "first_k_dense_replace": 1, "num_key_value_heads": 16}
    | {"q_lora_rank": None, "kv_lora_rank": 512, "v_head_dim": 128}
    | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    | _sizes(2048, 10944, 27, 16),
    "deepseek-v3": {"model_type": "deepseek_v3"},
}
_ALIASES = {"llama-7b": "llama-2-7b", "llama-13b": "llama-2-13b", "llama-70b": "llama-2-70b"}
_ALIASES |= {"llama-3-8b": "llama-3.1-8b", "llama-3.1-70b": "llama-3.3-70b"}
# Suffixes of Hub names after the architecture.
_ENDINGS = re.compile(r"[-_.](instruct|it|chat|base|pt|hf|v\d[\d.]*|\d{4})$")


def known(name: str) -> str | None:
    """Returns the key in ``KNOWN`` for a name in any spelling, or None.

    "llama2-7b", "Llama 2 7B" and "meta-llama/Llama-2-7b-hf" give "llama-2-7b".
    """
    wanted = name.lower().rsplit("/", 1)[-1]
    while (shorter := _ENDINGS.sub("", wanted)) != wanted:
        if _plain(wanted) in _PLAIN:
            break
        wanted = shorter
    return _PLAIN.get(_plain(wanted))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_PLAIN = {_plain(name): name for name in KNOWN} | {_plain(k): v for k, v in _ALIASES.items()}


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
