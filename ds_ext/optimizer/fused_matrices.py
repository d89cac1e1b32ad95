"""The sections of fused matrices of known models, for ``"split": "auto"``.

The sizes come from the configs of transformers' models. A fused QKV is stored in one of two ways:
q, k and v one after another, or the parts of q, k and v of each head (or group of heads) together.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ds_ext import logs
from ds_ext.distributed import consensus
from ds_ext.hyperparams import dotted
from ds_ext.optimizer.model_view import ModelView, summary

Keys = dict[str, Any]  # of a param group: "split", "heads" and "split_dim"

# q, k and v of one head lie together
PER_HEAD = {"bloom", "gpt_neox", "persimmon"}
# several heads of q may share one of k and v, by the config
GROUPED = {"chatglm", "dbrx", "falcon", "gpt_bigcode", "phi3"}
THIRDS = {"modernbert", "mpt"}  # q, k, v of equal size
CONV1D = {"gpt2", "imagegpt", "openai-gpt"}  # weights are transposed
_FUSED = re.compile("qkv|query_key_value|c_attn|gate_up", re.IGNORECASE)


def found(model: ModelView, params: Iterable[Tensor], where: str) -> dict[Tensor, Keys]:
    """Returns the keys of the fused matrices among ``params``, and logs what was found.

    ``where`` is the section of the config that has the key, for messages.

    Raises:
        ValueError: the model has no config of transformers.
    """
    configs = {
        f"{name}." * bool(name): module.config
        for name, module in model.module.named_modules()
        if hasattr(getattr(module, "config", None), "model_type")
    }
    if not configs:
        raise ValueError(
            f'{dotted(where, "split")} is "auto", which needs a model with a config of '
            "transformers: list the rows of each matrix instead, in an entry of param_groups."
        )
    known, unknown = {}, []
    for param in (param for param in params if param in model.owners):
        name, owner = model.owners[param]
        prefix = max((x for x in configs if name.startswith(x)), key=len, default="")
        config = configs.get(prefix) or next(iter(configs.values()))
        shape = model.shape(param)[param in model.stacked :]
        made = _sizes(name, owner, config, shape)
        if made is not None and _fits(made, shape):
            known[param] = {"split": made[0], "heads": made[1], "split_dim": made[2]}
        elif _FUSED.search(name) and len(shape) == 2:
            unknown.append(name)
    _log({param: model.owners[param][0] for param in known}, known, unknown)
    return known


def _log(names: Mapping[Tensor, str], known: Mapping[Tensor, Keys], unknown: list[str]) -> None:
    """Logs the fused matrices, and those whose sizes are unknown, on the first rank."""
    alike: dict[str, list[str]] = {}
    for param, keys in known.items():
        set_ = (f"{key} {x}" for key, x in keys.items() if x)
        alike.setdefault(", ".join(set_), []).append(names[param])
    lines = [f"{summary(some)}: {keys}" for keys, some in alike.items()] or ["no fused matrix"]
    if unknown:
        lines.append(f"of unknown sizes, stepped as a whole: {summary(unknown)}")
    if consensus.is_first():
        logs.show_by_default()
        logs.logger.info('"split": "auto" found %s', "; ".join(lines))


# Sizes, heads and dimension of a matrix, as of ``SectionConfig``.
Sizes = tuple[list[int], int | None, int]


def _fits(made: Sizes, shape: tuple[int, ...]) -> bool:
    """Whether the sizes add up to the rows, or columns, of a matrix."""
    sizes, heads, dim = made
    return len(shape) == 2 and min(sizes) > 0 and sum(sizes) * (heads or 1) == shape[dim]


def _sizes(name: str, owner: Any, config: Any, shape: tuple[int, ...]) -> Sizes | None:
    """The sizes of a matrix; None if it is not fused, or not known."""
    if len(shape) != 2:
        return None
    path, _, own = name.rpartition(".")
    layer = own if own != "weight" else path.rpartition(".")[2]
    if layer == "gate_up_proj":
        return _gate_up(owner, config, shape)
    if layer == "dense_h_to_4h" and config.model_type == "chatglm":
        return [shape[0] // 2] * 2, None, 0
    if layer in ("qkv_proj", "query_key_value", "Wqkv", "c_attn"):
        return _qkv(config, shape)
    return None


def _gate_up(owner: Any, config: Any, shape: tuple[int, ...]) -> Sizes | None:
    """Of fused gate and up projections, of one layer or of an expert."""
    is_layer = hasattr(owner, "out_features")
    is_known = is_layer or hasattr(owner, "is_transposed") or config.model_type == "llama4_text"
    if not is_known or not getattr(owner, "has_gate", True):
        return None
    dim = int(getattr(owner, "is_transposed", not is_layer))
    size = shape[dim] // 2
    if getattr(owner, "is_concatenated", True):
        return [size, size], None, dim
    return [1, 1], size, dim  # gate and up alternate


def _qkv(config: Any, shape: tuple[int, ...]) -> Sizes | None:
    """Of fused query, key and value projections."""
    kind, size = config.model_type, shape[0]
    if kind in CONV1D:  # of cross attention only k and v
        return [size] * (shape[1] // size), None, 1
    if kind in THIRDS:
        return [size // 3] * 3, None, 0
    if kind == "codegen":  # four blocks of q, v and k, whatever the number of heads
        return [size // 12] * 3, 4, 0
    if kind not in PER_HEAD | GROUPED:
        return None
    heads = getattr(config, "num_attention_heads", None) or config.n_heads
    hidden = getattr(config, "hidden_size", None) or config.d_model
    dim = getattr(config, "head_dim", None) or hidden // heads
    groups = None  # of query heads that share k and v
    if kind == "phi3":
        groups = config.num_key_value_heads
    elif kind == "dbrx":
        groups = config.attn_config.kv_n_heads
    elif kind == "falcon" and config.new_decoder_architecture:
        groups = config.num_kv_heads
        return [heads // groups * dim, dim, dim], groups, 0
    elif kind in ("falcon", "gpt_bigcode"):
        groups = 1 if config.multi_query else None
    elif kind == "chatglm":
        dim = config.kv_channels
        groups = config.multi_query_group_num if config.multi_query_attention else None
    if groups is None:
        return [dim] * 3, heads, 0
    return [heads * dim, groups * dim, groups * dim], None, 0
