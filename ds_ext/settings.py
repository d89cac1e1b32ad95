"""Settings of a DeepSpeed config that ds_ext uses, refuses or ignores: each key once.

``Section`` has the keys of the section "ds_ext", ``SETTINGS`` all keys. The engine,
``fuse_into_backward``, the commands and docs/reference/keys.md read them. To add a key, add it
here, and read its value where it is used.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool

from ds_ext.hyperparams import Count, NonNegative


def _at_most_one(value: Any) -> bool:
    return not isinstance(value, int) or value <= 1


@dataclass(frozen=True)
class Setting:
    """What ds_ext does with a key of a config. None of it applies to null and to ``off`` values."""

    type: Any = Any  # DeepSpeed converts values to it, for example "3" to 3
    off: Callable[[Any], bool] = operator.not_
    advice: str = ""  # if given, other values are refused; says what to do instead
    allowed: tuple[Any, ...] = ()  # values that are on, and are not refused all the same
    removed: str = ""  # the version of ds_ext that removed the key
    no_effect: str = ""  # if given, other values have no effect; says why
    needs_stage_3: bool = False  # whether other values work at ZeRO stage 3 only
    excludes: tuple[str, ...] = ()  # keys that must be off then
    divides_ranks: bool = False  # whether the number of ranks must be a multiple of the value
    may_exceed_ranks: bool = False  # whether a value above the number of ranks means all of them
    only_in_run: bool = False  # whether only a run can check other values
    is_required: bool = False  # whether its section must have it


_HPZ = "zero_optimization.zero_hpz_partition_size"
_AUTO_TP = "tensor_parallel.autotp_size"
_AUTO_EP = "expert_parallel.enabled"
_OFFLOADS = tuple(f"zero_optimization.offload_{what}.device" for what in ("optimizer", "param"))

PolicyName = Literal["fused", "sharded"]
ClipMode = Literal["exact", "previous"]
Int8 = Literal["int8"]
Chunks = Annotated[StrictBool | Count, Field(description="true, false or a whole number > 0")]


@dataclass(frozen=True)
class Section:
    """The section "ds_ext". The comment of a key is its description in docs/reference/keys.md."""

    gradient_policy: PolicyName | None = None  # null: `sharded` if gradients must be kept
    clip_mode: ClipMode = "exact"  # `previous`: clip by the previous step's norm, approximately
    clip_value: NonNegative = 0.0  # largest absolute value of a gradient element; 0: no limit
    measure_updates: bool | None = None  # RMS of updates and weights; null: if a monitor is on
    batch_splits: Count = 1  # pieces of a batch, which each layer runs in turn
    chunked_loss: Chunks = False  # the loss in chunks of tokens: true, or their number
    weight_storage: Int8 | None = None  # `int8`: stores large matrices in 8 bits


# Types of DeepSpeed's values, for errors that name the key.


def _typed(kind: Any, description: str, refused: Any = bool, **bounds: Any) -> Any:
    """A type as which pydantic reads values, except instances of ``refused``."""

    def refuse(value: Any) -> Any:
        if isinstance(value, refused):
            raise ValueError
        return value

    return Annotated[kind, BeforeValidator(refuse), Field(description=description, **bounds)]


SECTION = _typed(dict[str, Any], 'a section, {"key": value, ...}', ())
_TEXT = _typed(str, "a name", ())
_SWITCH = _typed(bool, "true or false", ())
_NUMBER = _typed(float, "a number")  # pydantic alone takes true for 1
_STAGE = _typed(int, "0, 1, 2, 3", ge=0, le=3)
_WHOLE = _typed(int, "a whole number >= 0", ge=0)
# DeepSpeed does not convert text to these.
_SIZE = _typed(int, "a whole number >= 0", bool | str, ge=0)
_COUNT = _typed(int, "a whole number > 0", bool | str, gt=0)
DTYPES = {  # as DeepSpeed spells them
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "float16"),
}
_DTYPE: Any = Annotated[Literal[tuple(DTYPES)], Field(description="fp32, bf16, fp16")]

_REMOVE = "remove it."
_EXACT = "remove it; {} are then exact, and checkpoints load."
_MASTER = (
    'remove it. "weight_update" in optimizer.params says how 16-bit weights are written, with no '
    'copy in fp32 unless it is "master"; data_types.grad_accum_dtype, what gradients are kept in; '
    "statistics are fp32."
)
_HOST = (
    'remove it: offload_param and offload_optimizer, each {"device": "cpu"}, replace it, with '
    "pin_memory."
)
_NVME = "DeepSpeed has it for NVMe and its own CPU optimizer"
_DEVICE = Setting(
    off=lambda v: v == "none",
    advice='ds_ext offloads to the memory of the host, not to NVMe. Set it to "cpu", or remove it.',
    allowed=("cpu",),
)
_RATIO = Setting(
    _NUMBER,
    off=lambda v: v == 1,
    advice="it is for DeepSpeed's own optimizers on the CPU; remove it.",
)
# Sections that DeepSpeed requires to be objects.
_SECTIONS = (
    *("zero_optimization", "fp16", "bf16", "data_types", "checkpoint", "tensor_parallel"),
    *("compile", "torch_autocast", "activation_checkpointing", "pipeline", "flops_profiler"),
    *("hybrid_engine", "data_efficiency", "comms_logger", "weight_quantization"),
    *("optimizer", "scheduler"),
)
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_ZERO = {
    "stage": Setting(_STAGE),
    "reduce_bucket_size": Setting(_typed(int, "a whole number > 0", gt=0)),
    "zero_hpz_partition_size": Setting(
        _WHOLE, _at_most_one, needs_stage_3=True, divides_ranks=True, may_exceed_ranks=True
    ),
    **{
        f"{section}.{option}": Setting(off=lambda v: False, no_effect=_NVME)
        for section in ("offload_param", "offload_optimizer")
        for option in (
            *("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read"),
            *("pipeline_write", "fast_init", "cpuadam_cores_perc"),
        )
    },
    "offload_param": Setting(SECTION | None),
    "offload_param.device": replace(_DEVICE, needs_stage_3=True),
    "offload_param.ratio": _RATIO,
    "offload_optimizer": Setting(SECTION | None),
    "offload_optimizer.device": _DEVICE,
    "offload_optimizer.ratio": _RATIO,
    "offload_optimizer.super_offload": Setting(_SWITCH, advice=_REMOVE),
    "cpu_offload": Setting(_SWITCH, advice=_HOST),
    "cpu_offload_param": Setting(_SWITCH, advice=_HOST),
    "cpu_offload_use_pin_memory": Setting(
        off=lambda v: False,
        no_effect="pin_memory in offload_param and offload_optimizer replaces it",
    ),
    "zero_quantized_gradients": Setting(_SWITCH, advice=_EXACT.format("gradients"), removed="1.1"),
    "zero_quantized_weights": Setting(
        _SWITCH, advice=_EXACT.format("gathered weights"), removed="1.1"
    ),
    "zero_quantized_nontrainable_weights": Setting(_SWITCH, advice=_REMOVE),
    "mics_shard_size": Setting(
        off=lambda v: v == -1,
        advice="remove it: zero_hpz_partition_size keeps a copy of the weights on each host.",
    ),
    "mics_hierarchical_params_gather": Setting(advice=_REMOVE),
    "zenflow": Setting(off=lambda v: v is None, advice=_REMOVE),  # {} is on
    "reduce_scatter": Setting(
        _SWITCH, bool, no_effect="ds_ext always reduces each gradient to the rank that steps it"
    ),
    "ignore_unused_parameters": Setting(
        _SWITCH,
        bool,
        no_effect="a parameter without a gradient is not stepped, and that is no error",
    ),
}
SETTINGS: dict[str, Setting] = {
    **{key: Setting(SECTION) for key in _SECTIONS},
    "optimizer.type": Setting(_TEXT),
    "optimizer.params": Setting(SECTION | None),
    "optimizer.legacy_fusion": Setting(no_effect="it is for DeepSpeed's own optimizers"),
    "scheduler.type": Setting(_TEXT, is_required=True),
    "scheduler.params": Setting(SECTION, is_required=True),
    **{key: Setting(_COUNT) for key in SIZES},
    "gradient_clipping": Setting(NonNegative),
    "steps_per_print": Setting(_typed(float, "a number > 0", gt=0)),  # accelerate sets infinity
    "data_types.grad_accum_dtype": Setting(_DTYPE),
    "sequence_parallel_size": Setting(
        _COUNT,
        _at_most_one,
        excludes=(_AUTO_TP, _AUTO_EP),
        divides_ranks=True,
        only_in_run=True,
    ),
    "tensor_parallel.autotp_size": Setting(
        _SIZE, _at_most_one, divides_ranks=True, only_in_run=True
    ),
    "expert_parallel.enabled": Setting(only_in_run=True),
    "expert_parallel.expert_tensor_parallel_size": Setting(off=lambda v: v == 1, advice=_REMOVE),
    **{f"zero_optimization.{key}": setting for key, setting in _ZERO.items()},
    "bf16.enabled": Setting(_SWITCH),
    "fp16.enabled": Setting(_SWITCH),
    "fp16.fp16_master_weights_and_grads": Setting(_SWITCH, advice=_MASTER),
    "bf16.bf16_master_weights_and_grads": Setting(_SWITCH, advice=_MASTER),
    "bf16.bf16_optimizer_states": Setting(_SWITCH, advice=_MASTER),
    "prescale_gradients": Setting(advice=_REMOVE),
    "gradient_predivide_factor": Setting(off=lambda v: v == 1, advice=_REMOVE),
    "compile.deepcompile": Setting(
        _SWITCH, advice="remove it; engine.compile() compiles the model."
    ),
    "checkpoint.load_universal": Setting(
        advice="remove it, and load what engine.save_checkpoint of ds_ext wrote as it is: on any "
        "number of ranks and at any ZeRO stage, without ds_to_universal."
    ),
    "checkpoint.use_node_local_storage": Setting(
        advice="remove it, and save to a file system that all ranks share: each reads parts of all."
    ),
    "checkpoint.writer": Setting(advice=_REMOVE),
    "checkpoint.checkpoint_serialization": Setting(
        off=bool, no_effect="DeepSpeed itself does not read it"
    ),
    "datastates_ckpt": Setting(off=lambda v: v is False, advice=_REMOVE),
    "nebula.enabled": Setting(advice=_REMOVE),
    "ds_ext.shard_size": Setting(
        advice="delete it, and checkpoints load. zero_optimization.zero_hpz_partition_size keeps a "
        "copy of the weights on each host.",
        removed="1.1",
    ),
    "ds_ext.sum_group_size": Setting(
        off=lambda v: v in (0, 1),
        advice="delete it; results and checkpoints do not depend on it.",
        removed="1.1",
    ),
    "ds_ext.chunked_loss": Setting(excludes=(_AUTO_TP,)),
    # Ranks exchange the tokens of each piece.
    "ds_ext.batch_splits": Setting(off=_at_most_one, excludes=(_AUTO_EP,)),
    "ds_ext.weight_storage": Setting(
        excludes=(*_OFFLOADS, _HPZ, _AUTO_TP, _AUTO_EP, "fp16.enabled")
    ),
}
# The dotted keys that a key in a wrong section may mean. Those of optimizers are the ones that all
# of them have.
PLACES = {
    *SETTINGS,
    *(f"ds_ext.{field.name}" for field in fields(Section)),
    *(f"optimizer.params.{key}" for key in ("lr", "weight_decay", "param_groups")),
    *(f"optimizer.params.{key}" for key in ("weight_update", "ema_decay", "ema_dtype")),
}
