"""Refuses models that FSDP1 or DDP has wrapped. It compares names of classes.

Importing torch.distributed.fsdp takes seconds; a program with such a model has imported it.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from ds_ext.distributed.dtensors import is_dtensor

_WRAPPERS = {
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel (FSDP1)",
    "torch.nn.parallel.distributed": "DistributedDataParallel",
}


def refuse_wrapped(model: nn.Module) -> None:
    """Raises ValueError if a module of ``model`` is in FSDP1 or in DDP."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            wrapper = _WRAPPERS.get(kind.__module__)
            if wrapper is not None:
                raise ValueError(
                    f"{name or 'the model'} is wrapped by {wrapper}: pass the model itself. ds_ext "
                    "averages gradients over the ranks. To shard weights, gradients and states, "
                    "use fully_shard (FSDP2), or a ZeRO stage of deepspeed.initialize."
                )


def refuse_dtensors(model: nn.Module) -> None:
    """Raises ValueError if parameters of a model for DeepSpeed are DTensors."""
    for name, param in model.named_parameters():
        if is_dtensor(param):
            raise ValueError(
                f"{name} is a DTensor: torch has already distributed it over the ranks "
                "(fully_shard, tp_plan). Pass a model without DTensors to deepspeed.initialize, "
                "and shard it with a ZeRO stage or tensor_parallel.autotp_size; or train it "
                "without DeepSpeed, with ds_ext.fuse_into_backward."
            )


def refuse_flat(params: Iterable[Tensor]) -> None:
    """Raises ValueError for FSDP1's flat parameters, which have no rows or columns."""
    if any(getattr(param, "_is_flat_param", False) for param in params):
        raise ValueError(
            "a parameter is a flat parameter of FullyShardedDataParallel (FSDP1), which hides the "
            "shapes of its matrices: use fully_shard (FSDP2), or a ZeRO stage of "
            "deepspeed.initialize."
        )
