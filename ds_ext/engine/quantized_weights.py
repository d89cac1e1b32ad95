"""ZeRO++ quantized weights (qwZ): DeepSpeed gathers 8-bit weights, and ds_ext steps exact weights.

DeepSpeed quantizes a copy of each rank's run when it gathers a module's weights for forward and
backward. Rules, checkpoints and ``safe_get_*`` use the exact runs.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer, MultipleAllGatherHandles
from torch import Tensor

from ds_ext.distributed.groups import size_of
from ds_ext.engine.parameters import deepspeed_parameter
from ds_ext.engine.rank_logging import log

KEY = "zero_optimization.zero_quantized_weights"


def refuse_without_quantizer(engine: DeepSpeedEngine) -> None:
    """Checks that DeepSpeed's quantizer is available if an engine's config requests it.

    Raises:
        ValueError: the accelerator does not support the quantizer.
    """
    device = get_accelerator().device_name()
    if engine.zero_quantized_weights() and device == "cpu" and not _is_loaded():
        raise ValueError(
            f"{KEY} = True: DeepSpeed's quantizer is an operation of GPUs, and its accelerator "
            f"here is {device}: remove it."
        )


def _is_loaded() -> bool:
    return CUDAQuantizer.quantizer_cuda_module is not None


def exclude_unquantizable(offload: DeepSpeedZeRoOffload, params: Iterable[Tensor]) -> None:
    """Makes DeepSpeed gather persistent and unquantizable parameters without quantization.

    DeepSpeed can only quantize runs without padding whose size is a multiple of 8 elements.

    Args:
        offload: DeepSpeed's object that gathers the parameters.
        params: all parameters of the model, partitioned.
    """
    if not offload.zero_quantized_weights:
        return
    params = list(params)
    for param in params:
        own = deepspeed_parameter(param)
        own.all_gather_coalesced = _without_unquantizable(own.all_gather_coalesced)
    exact = sum(not _is_quantized(p) for p in params)
    log(
        f"{KEY}: weights are gathered in 8 bits (through fp16), but updated in full precision; "
        f"{exact} of {len(params)} parameters are gathered without quantization"
    )


def _without_unquantizable(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a parameter's ``all_gather_coalesced``, which gathers any list of parameters."""

    @functools.wraps(original)
    def gather(params: Iterable[Tensor], safe_mode: bool = False, quantize: bool = False) -> Any:
        if not quantize:
            return original(params, safe_mode=safe_mode)
        params = list(params)
        quantized, exact = (
            [p for p in params if _is_quantized(p) is wanted] for wanted in (True, False)
        )
        handles = [original(quantized, safe_mode=safe_mode, quantize=True)] if quantized else []
        handles += [original(exact, safe_mode=safe_mode)] if exact else []
        return MultipleAllGatherHandles(handles)

    return gather


def _is_quantized(param: Tensor) -> bool:
    own = deepspeed_parameter(param)
    return not own.ds_persist and own.ds_shape.numel() % (8 * size_of(own.ds_process_group)) == 0
