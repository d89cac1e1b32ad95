"""What a DeepSpeed config says of gradients, and which of its settings are refused, by name."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from ds_ext import hyperparams
from ds_ext.hyperparams import NonNegative

BUCKET_SIZE = 2**24  # elements; DeepSpeed's default of 5e8 is itself 1 GB of bf16


_DTYPES = {  # as DeepSpeed spells them
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
}
PolicyName = Annotated[Literal["fused", "sharded"], Field(description='"fused" or "sharded"')]
ClipMode = Annotated[Literal["exact", "previous"], Field(description='"exact" or "previous"')]


def refuse(config: dict[str, Any]) -> None:
    """Raises ValueError, on every rank alike, naming the first setting that cannot be honoured."""
    for key, honoured, advice in _HONOURED:
        value = _lookup(config, key)
        if value is not None and not honoured(value):
            raise ValueError(f"ds_ext cannot honour {key} = {value!r} yet: {advice}")
    copies = _lookup(config, "zero_optimization.zero_hpz_partition_size")
    stage = _lookup(config, "zero_optimization.stage")
    if isinstance(copies, int) and copies > 1 and stage != 3:
        raise ValueError(
            f"zero_optimization.zero_hpz_partition_size = {copies} copies what stage 3 partitions, "
            f"but zero_optimization.stage is {stage}: remove it."
        )


def _off(value: Any) -> bool:
    return not value


def _one(value: Any) -> bool:
    return bool(value == 1)


_REMOVE = "remove it."
_MASTER = (
    'remove it. "weight_update" in optimizer.params says how 16-bit weights are written, with no '
    'copy in fp32 unless it is "master"; data_types.grad_accum_dtype, what gradients are kept in; '
    "statistics are fp32."
)

_ANY = (
    "remove it, and load what engine.save_checkpoint wrote, or a checkpoint of DeepSpeed's AdamW, "
    "as it is: it loads on any number of ranks and at any ZeRO stage without ds_to_universal."
)
_OFFLOAD = (
    'remove it: offload_param and offload_optimizer, each {"device": "cpu"}, replace it, with '
    "pin_memory."
)
_SHARED = "remove it, and save to a file system that all ranks share: each reads parts of all."

# (key, what is honoured, what to do otherwise)
_HONOURED = [
    ("zero_optimization.zenflow", _off, _REMOVE),
    ("zero_optimization.offload_optimizer.super_offload", _off, _REMOVE),
    ("zero_optimization.reduce_scatter", lambda v: v is True, _REMOVE),
    ("zero_optimization.cpu_offload", _off, _OFFLOAD),
    ("zero_optimization.cpu_offload_param", _off, _OFFLOAD),
    ("zero_optimization.cpu_offload_use_pin_memory", lambda v: False, _OFFLOAD),
    ("zero_optimization.zero_quantized_weights", _off, _REMOVE),
    ("zero_optimization.zero_quantized_nontrainable_weights", _off, _REMOVE),
    ("zero_optimization.zero_quantized_gradients", _off, _REMOVE),
    ("fp16.fp16_master_weights_and_grads", _off, _MASTER),
    ("bf16.bf16_master_weights_and_grads", _off, _MASTER),
    ("bf16.bf16_optimizer_states", _off, _MASTER),
    ("prescale_gradients", _off, _REMOVE),
    ("gradient_predivide_factor", _one, _REMOVE),
    ("expert_parallel.expert_tensor_parallel_size", _one, _REMOVE),
    ("compile.deepcompile", _off, "remove it; engine.compile() compiles the model."),
    ("checkpoint.load_universal", _off, _ANY),
    ("checkpoint.use_node_local_storage", _off, _SHARED),
    ("checkpoint.writer", _off, _REMOVE),
    ("checkpoint.checkpoint_serialization", lambda v: v is True, _REMOVE),
    ("datastates_ckpt", lambda v: v is False, _REMOVE),
]


def _lookup(config: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(config, dict):
            return None
        config = config.get(part)
    return config


@dataclass(frozen=True)
class Section:
    """The section "ds_ext" of a DeepSpeed config."""

    gradient_policy: PolicyName | None = None  # null: "sharded" where gradients have to be kept
    clip_mode: ClipMode = "exact"  # "previous": approximately, by the norm of the step before
    clip_value: NonNegative = 0.0  # largest absolute value of a gradient's element; 0: none
    measure_updates: bool | None = None  # RMS of updates and weights; null: if a monitor is on


@dataclass(frozen=True)
class Gradients:
    """How gradients are reduced, kept and clipped; ValueError for what contradicts itself."""

    bucket_size: int = BUCKET_SIZE  # elements
    policy: str = "fused"
    max_norm: float = 0.0  # 0: not clipped
    max_value: float = 0.0
    clip_mode: str = "exact"
    average: bool = True  # over the ranks, else summed
    accumulate_in: torch.dtype | None = None  # of kept gradients; None: fp32
    measure_updates: bool = False  # the RMS of updates and weights, by group
    overlap: bool = False  # buckets are reduced and stepped beside backward, two in flight

    def __post_init__(self) -> None:
        given = {
            "gradient_policy": self.policy,
            "clip_mode": self.clip_mode,
            "clip_value": self.max_value,
        }
        hyperparams.check(Section, given, "ds_ext")
        if self.max_norm and self.max_value:
            raise ValueError(
                f"gradient_clipping = {self.max_norm} and ds_ext.clip_value = {self.max_value} "
                "clip the same gradients: set one of them to 0."
            )
        if self.clip_mode == "previous" and not self.max_norm:
            raise ValueError('ds_ext.clip_mode = "previous" needs gradient_clipping > 0.')
        if self.clip_mode == "previous" and self.policy == "sharded":
            raise ValueError(
                'ds_ext.clip_mode = "previous" is for gradients that are not kept; here they are '
                "(gradient_policy sharded), and clipped exactly at no cost: remove it."
            )
        if self.accumulate_in is not None and self.policy == "fused":
            raise ValueError(
                "data_types.grad_accum_dtype: no gradient is accumulated; remove it, or set "
                '"ds_ext": {"gradient_policy": "sharded"}.'
            )


def gradients(config: dict[str, Any], monitored: bool = False) -> Gradients:
    """What a DeepSpeed config, of which a monitor may be on, says of gradients."""
    given = config.get("ds_ext") or {}
    if not isinstance(given, dict):
        raise ValueError(f'ds_ext is {given!r}; allowed: a section, {{"gradient_policy": ...}}.')
    section = Section(**hyperparams.check(Section, given, "ds_ext"))
    kept = [
        f"{key} = {value!r}"
        for key, honoured in (
            ("gradient_accumulation_steps", 1),
            ("managed_gradient_accumulation", True),
        )
        if (value := config.get(key, honoured)) != honoured
    ]
    if kept and section.gradient_policy == "fused":
        raise ValueError(
            f'ds_ext.gradient_policy = "fused" keeps no gradients, as {kept[0]} needs: remove one.'
        )
    max_norm = config.get("gradient_clipping") or 0.0
    if not isinstance(max_norm, int | float) or not 0 <= max_norm < math.inf:
        raise ValueError(f"gradient_clipping is {max_norm!r}; allowed: a number >= 0.")
    dtype = _lookup(config, "data_types.grad_accum_dtype")
    if dtype is not None and (not isinstance(dtype, str) or dtype not in _DTYPES):
        raise ValueError(f"data_types.grad_accum_dtype is {dtype!r}; allowed: fp32, bf16, fp16.")
    return Gradients(
        bucket_size=bucket_size(config),
        policy=section.gradient_policy or ("sharded" if kept else "fused"),
        max_norm=float(max_norm),
        max_value=section.clip_value,
        clip_mode=section.clip_mode,
        accumulate_in=None if dtype is None else _DTYPES[dtype],
        measure_updates=monitored if section.measure_updates is None else section.measure_updates,
    )


def cost(kept_bytes: int) -> str:
    """What the log says of gradients that are kept."""
    return f"gradients are kept until the step: {kept_bytes / 2**20:,.1f} MiB on this rank"


def report(how: Gradients, config: dict[str, Any]) -> list[str]:
    """What the log says of how gradients are treated."""
    lines = [
        f"buckets of {how.bucket_size:,} gradient elements (zero_optimization.reduce_bucket_size)"
    ]
    if config.get("gradient_clipping") is None:
        lines.append(
            "gradient_clipping is not set: nothing is clipped (DeepSpeed's own optimizers would "
            'clip at its default, 1.0). Write "gradient_clipping": 0 to say so.'
        )
    elif how.max_norm:
        cost = {"exact": "exactly, by running backward twice", "previous": "approximately"}
        way = (
            "exactly, by scaling the kept ones" if how.policy == "sharded" else cost[how.clip_mode]
        )
        lines.append(
            f"gradients are clipped to a norm of {how.max_norm:g}, {way}. AdaLomo, Adafactor and "
            "CAME bound the RMS of each update anyway: gradient_clipping = 0 costs nothing."
        )
    return lines


def bucket_size(config: dict[str, Any]) -> int:
    """Gradient elements in flight: ``zero_optimization.reduce_bucket_size``, or our default."""
    size = _lookup(config, "zero_optimization.reduce_bucket_size")
    if size is None:
        return BUCKET_SIZE
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size < math.inf:
        raise ValueError(
            f"zero_optimization.reduce_bucket_size is {size!r}; allowed: a number of elements >= 0."
        )
    return int(size)
