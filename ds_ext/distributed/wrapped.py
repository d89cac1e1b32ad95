"""Models that another kind of data parallelism has wrapped or cut: refused, told by their classes.

torch.distributed.fsdp and .tensor take seconds to import; who has such a model has imported them.
"""

from collections.abc import Iterable

from torch import Tensor, nn

_WRAPPERS = {
    "torch.distributed.fsdp": "FSDP",
    "torch.nn.parallel.distributed": "DistributedDataParallel",
}


def refuse_wrapped(model: nn.Module) -> None:
    """Raises ValueError if a module of ``model`` is in FSDP, of either version, or in DDP."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            for source, wrapper in _WRAPPERS.items():
                if kind.__module__.startswith(source):
                    raise ValueError(
                        f"{name or 'the model'} is wrapped by {wrapper}: pass the model itself. "
                        "ds_ext averages gradients over the ranks, and cuts weights, gradients and "
                        "states up with a ZeRO stage of deepspeed.initialize."
                    )


def refuse_cut(params: Iterable[Tensor]) -> None:
    """Raises ValueError for DTensors, and for FSDP's flat parameters: parts of matrices."""
    for param in params:
        is_cut = type(param).__module__.startswith("torch.distributed")
        if is_cut or getattr(param, "_is_flat_param", False):
            raise ValueError(
                "a parameter is a DTensor, or a flat parameter of FSDP, of which a rank holds a "
                "part that no statistics of the whole can be taken of: use a model without FSDP "
                "or tp_plan, and spread it by a ZeRO stage, or tensor_parallel.autotp_size, of "
                "deepspeed.initialize."
            )
