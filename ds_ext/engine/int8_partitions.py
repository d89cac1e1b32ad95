"""ZeRO-3's partitions stored in 8 bits. DeepSpeed gathers their codes, and expands them.

A rank stores its run of a weight if all runs of the weight consist of whole groups. Its
``ds_tensor`` has bf16 values only in a step, and while it is read or written.
"""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import MultipleAllGatherHandles, ZeroParamStatus
from torch import Tensor, nn

from ds_ext.backward.int8_weights import NO_MATRIX, check_dtype, expand_int8
from ds_ext.distributed.groups import communicates, explained, size_of
from ds_ext.engine.parameters import deepspeed_parameter
from ds_ext.engine.rank_logging import log
from ds_ext.ops import int8

KEY = "ds_ext.weight_storage"


def store(module: nn.Module) -> None:
    """Stores a partitioned model in 8 bits, and makes DeepSpeed gather it in 8 bits.

    Raises:
        ValueError: a trainable weight is not bf16, or no weight can be stored.
    """
    for name, param in module.named_parameters():
        check_dtype(f'{KEY} = "int8": {name}', param)
    params = list(module.parameters())
    stored = []
    for param in params:
        own = deepspeed_parameter(param)
        fits = int8.fits(own.ds_shape, size_of(own.ds_process_group))
        if fits and param.requires_grad and not own.ds_persist:
            stored.append(param)
    if not any(p.requires_grad and int8.fits(deepspeed_parameter(p).ds_shape) for p in params):
        raise ValueError(NO_MATRIX)
    if not stored:
        raise ValueError(
            f'{KEY} = "int8": no trainable matrix is larger than '
            "zero_optimization.stage3_param_persistence_threshold and has a multiple of "
            f"{int8.SIZE} elements on each rank: remove {KEY}, or lower the threshold."
        )
    for param in (p for p in stored if int8.find(p) is None):
        own = deepspeed_parameter(param)
        start = dist.get_rank(own.ds_process_group) * own.ds_tensor.numel()
        int8.store(param, partition=own.ds_tensor, start=start)
    for param in params:
        _expand_in(param)
    log(f"{KEY}: {len(stored)} of {len(params)} parameters are stored and gathered in 8 bits")


def _expand_in(param: Tensor) -> None:
    """Wraps the functions of a parameter that gather and partition any list of parameters."""
    own = deepspeed_parameter(param)
    coalesced, gathered, partitioned = own.all_gather_coalesced, own.all_gather, own.partition

    def all_gather_coalesced(params: Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        params = list(params)
        stored = [p for p in params if int8.find(p)]
        others = [p for p in params if not int8.find(p)]
        handles: list[Any] = [CodesGather(stored)] if stored else []
        handles += [coalesced(others, *args, **kwargs)] if others else []
        return MultipleAllGatherHandles(handles)

    def all_gather(param_list: list[Tensor] | None = None, *args: Any, **kwargs: Any) -> Any:
        params = [param] if param_list is None else param_list
        absent = ZeroParamStatus.NOT_AVAILABLE
        stored = [p for p in params if int8.find(p) and deepspeed_parameter(p).ds_status == absent]
        if stored:
            CodesGather(stored).wait()
        return gathered(params, *args, **kwargs)

    def partition(param_list: list[Tensor] | None = None, *args: Any, **kwargs: Any) -> None:
        # DeepSpeed writes to the partition if the gathered values have changed.
        for each in [param] if param_list is None else param_list:
            with expand_int8(each if kwargs.get("has_been_updated") else ()):
                partitioned([each], *args, **kwargs)

    own.all_gather_coalesced, own.all_gather = all_gather_coalesced, all_gather
    own.partition = partition


class CodesGather:
    """A gather of codes and scales in progress: a handle of DeepSpeed's gathers."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.params = sorted(params, key=lambda p: deepspeed_parameter(p).ds_id)
        for own in map(deepspeed_parameter, self.params):
            if own.ds_status != ZeroParamStatus.NOT_AVAILABLE:
                raise RuntimeError(f"cannot gather {own.ds_summary()}")
            own.ds_status = ZeroParamStatus.INFLIGHT
        group = deepspeed_parameter(self.params[0]).ds_process_group
        runs = [held.stored for p in self.params if (held := int8.find(p))]
        self.codes, self.work = [run.unsqueeze(0) for run in runs], None
        if communicates(group):
            self.codes = [run.new_empty(size_of(group), len(run)) for run in runs]  # [ranks, bytes]
            with explained():
                flat = [codes.view(-1) for codes in self.codes]
                self.work = group.allgather_into_tensor_coalesced(flat, runs)

    def wait(self, handle_dependency: bool = True) -> None:
        """Waits for the codes, and gives the parameters their bf16 values."""
        if self.work is not None:
            with explained():
                self.work.wait()
        for param, codes in zip(self.params, self.codes, strict=True):
            own = deepspeed_parameter(param)
            param.data = int8.decode(codes, param.new_empty(own.ds_shape))
            own.ds_status = ZeroParamStatus.AVAILABLE
        self.params, self.codes = [], []  # DeepSpeed waits once for each parameter
