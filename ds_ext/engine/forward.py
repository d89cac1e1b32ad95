"""Settings of the forward pass under an engine: ``"ds_ext": {"batch_splits": n}`` and others."""

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.z3_leaf_module import set_z3_leaf_module
from torch import nn

from ds_ext.backward import int8_weights
from ds_ext.config import config_checks
from ds_ext.config.parsing import edited, normalized, section
from ds_ext.errors import raise_all
from ds_ext.forward import batch_splits, chunked_loss


def apply(engine: DeepSpeedEngine, model: nn.Module) -> None:
    """Changes an engine's model as its config says, before DeepSpeed adds its hooks.

    If a layer runs its batch in pieces at ZeRO-3 it becomes a leaf module: DeepSpeed gathers its
    weights once a pass, not once for each piece. With frozen weights it stays as it is.

    Raises:
        ValueError: the model does not support a setting.
    """
    own = section(engine._config._param_dict)
    if own.weight_storage or int8_weights.is_stored(model):
        _refuse_int8(engine, model)
    at_stage_3 = engine.zero_optimization_stage() == 3  # int8_partitions stores partitions
    if own.weight_storage and not at_stage_3 and not int8_weights.is_stored(model):
        for param in model.parameters() if engine.bfloat16_enabled() else ():
            if param.dtype in (torch.float32, torch.float16):
                param.data = param.data.bfloat16()  # as DeepSpeed does later
        int8_weights.store_int8(model, None if engine.dont_change_device else engine.device)
    if own.chunked_loss:
        chunked_loss.chunk_loss(model, None if own.chunked_loss is True else own.chunked_loss)
    if own.batch_splits > 1:
        _refuse(model, own.batch_splits)
        try:
            batch_splits.split_batch(model, own.batch_splits)
        except ValueError as error:
            raise ValueError(f"ds_ext.batch_splits = {own.batch_splits}: {error}") from None
    # A leaf module needs an input with a gradient, which frozen embeddings do not give.
    if at_stage_3 and all(p.requires_grad for p in model.parameters()):
        for layer in batch_splits.layers_of(model):
            set_z3_leaf_module(layer, True)


def _refuse_int8(engine: DeepSpeedEngine, model: nn.Module) -> None:
    """Raises ValueError for settings and models without weights in 8 bits."""
    config = normalized(engine._config._param_dict)
    config = edited(config, {"ds_ext.weight_storage": "int8"})
    raise_all(config_checks.problems(config))
    is_moe = any(hasattr(module, "deepspeed_moe") for module in model.modules())
    if is_moe or isinstance(model, PipelineModule):
        raise int8_weights.unsupported("deepspeed.moe" if is_moe else "PipelineModule")
    if engine.zero_optimization_stage() == 3 and int8_weights.is_stored(model):
        raise ValueError(
            "zero_optimization.stage = 3 divides the model before it stores it in 8 bits: do not "
            'call store_int8, set "ds_ext": {"weight_storage": "int8"}.'
        )


def _refuse(model: nn.Module, splits: int) -> None:
    """Raises ValueError for models whose pieces would not be those of one batch."""
    if isinstance(model, PipelineModule):
        reason = "a PipelineModule runs micro-batches itself: raise gradient_accumulation_steps"
    elif any(hasattr(module, "deepspeed_moe") for module in model.modules()):
        reason = "deepspeed.moe computes capacities and its loss from whole batches: remove it"
    else:
        return
    raise ValueError(f"ds_ext.batch_splits = {splits}: {reason}.")
