"""Memory of LoRA: adapters of the linear layers, trained by DeepSpeed's AdamW.

Hu et al., arXiv 2106.09685, as in PEFT with ``target_modules="all-linear"``: y = W x + B A x.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_ext.planner import memory
from ds_ext.planner.memory import MemoryUse, Shapes

_CONFIG = "adapter_config.json"


class Adapted(nn.Module):
    """A frozen linear layer with a trained adapter of rank ``rank``, named as in PEFT."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        like = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.base_layer = base
        down = nn.Linear(base.in_features, rank, bias=False, **like)
        up = nn.Linear(rank, base.out_features, bias=False, **like)
        self.lora_A = nn.ModuleDict({"default": down})
        self.lora_B = nn.ModuleDict({"default": up})

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output plus the adapter's output, [..., out]."""
        found: Tensor = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return found


def adapt(model: Any, rank: int) -> None:
    """Freezes a model and adds adapters to its linear layers, except the output head."""
    model.requires_grad_(False)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for owner in list(model.modules()):
        for name, module in list(owner.named_children()):
            if type(module) is nn.Linear and module is not head:
                setattr(owner, name, Adapted(module, rank))
    if hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()  # for checkpointing, as in trainers


def adapted(model: nn.Module, lora: str) -> nn.Module:
    """Returns a model with adapters, with the parameter names of PEFT.

    Args:
        model: the model on the device "meta"; changed in place.
        lora: the rank of adapters for all linear layers; or the folder of an adapter_config.json,
            from which PEFT creates adapters of any kind.

    Raises:
        ValueError: ``lora`` is neither, PEFT is missing, or PEFT cannot adapt the model.
    """
    if lora.isdecimal() and int(lora):
        adapt(model, int(lora))
        return nn.ModuleDict({"base_model": nn.ModuleDict({"model": model})})
    folder = Path(lora).parent if Path(lora).name == _CONFIG else Path(lora)
    if not (folder / _CONFIG).is_file():
        raise ValueError(
            f"--lora {lora}: neither a rank, a whole number > 0, nor a folder with {_CONFIG}."
        )
    try:
        import peft
    except ImportError:
        raise ValueError(f"--lora {lora}: reading it needs PEFT: pip install peft") from None
    try:
        made: nn.Module = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(str(folder)))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"--lora {lora}: PEFT cannot adapt the model with this config: {error}"
        ) from None
    return made


def lora(
    model: nn.Module, rank: int, stage: int, ranks: int, dtype: torch.dtype, bucket: int
) -> MemoryUse:
    """Returns the memory of LoRA on the rank with the most memory.

    Args:
        model: the model on the device "meta"; adapted in place.
        rank: the rank of the adapters.
        stage: the ZeRO stage.
        ranks: the number of data-parallel ranks.
        dtype: the dtype of weights and gradients.
        bucket: reduce_bucket_size, in elements.
    """
    frozen: Shapes = memory.shapes_of(model)
    adapt(model, rank)
    trained = {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    adapters = memory.adamw(trained, stage, ranks, dtype, min(bucket, memory.elements(trained)))
    base = memory.elements(frozen) * dtype.itemsize / (ranks if stage == 3 else 1)
    return replace(adapters, weights=adapters.weights + base, kept=0.0)
