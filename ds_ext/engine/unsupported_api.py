"""Errors for engine and optimizer APIs of DeepSpeed that ds_ext does not support."""

_FP32 = "no fp32 copy of the weights is kept: use deepspeed.utils.safe_get_full_fp32_param."
_GRADIENTS = (
    'gradients are used inside backward: set "ds_ext": {"gradient_policy": "sharded"}, and use '
    "deepspeed.utils.safe_get_full_grad."
)
_CLIPPED = 'gradients are clipped inside backward: set "gradient_clipping" in the config.'
_ADVICE = {
    "fp32_partitioned_groups_flat": _FP32,
    "single_partition_of_fp32_groups": _FP32,
    "fp32_groups_flat": _FP32,
    "fp16_partitioned_groups_flat": "no flat buffer of the weights exists: use the parameters.",
    "bit16_groups_flat": "no flat buffer of the weights exists: use the parameters.",
    "refresh_fp32_params": (
        "master weights are updated automatically after edits of the weights: remove the call."
    ),
    "averaged_gradients": _GRADIENTS,
    "get_fp32_grad_partitions": _GRADIENTS,
    "reduce_gradients": "gradients are reduced inside backward: remove the call.",
    "unscale_and_clip_grads": _CLIPPED,
    "clip_grad": _CLIPPED,
    "override_loss_scale": 'set "fp16": {"loss_scale": ...} in the config.',
    "initialize_optimizer_states": "the first step creates the state: remove the call.",
    "has_overflow": "read engine.optimizer.overflow after engine.step().",
    "check_overflow": "read engine.optimizer.overflow after engine.step().",
}


def attribute(name: str) -> AttributeError:
    """Returns the error for a missing attribute of ``engine.optimizer``."""
    advice = _ADVICE.get(name, "docs/engine-api.md lists what it has.")
    return AttributeError(f"engine.optimizer of ds_ext has no {name}: {advice}")


COALESCE = (
    "engine.coalesce_grad_reduction(): gradients are reduced inside each backward. To add up "
    "several backward passes, call engine.set_gradient_accumulation_boundary(False) before all of "
    'them but the last, or set "gradient_accumulation_steps".'
)
BACKWARD = "engine.optimizer.backward(loss): call engine.backward(loss)."
CLIP = f"engine.clip_fp32_gradients(): {_CLIPPED}"
NO_OPTIMIZER = (
    'this engine cannot train: its config has a section "ds_ext" and names no optimizer. Name one '
    'in optimizer.type, such as "AdaLomo", or pass one to deepspeed.initialize.'
)
TILED_LOSS = (
    "TiledFusedLogitsLoss computes gradients inside the forward pass, and ds_ext uses them inside "
    'backward: call the model\'s own loss, with "ds_ext": {"chunked_loss": true} in the config.'
)
MEASURED_BESIDE = (
    "gradient_clipping: this loss also reaches an engine with an optimizer of DeepSpeed's own, "
    "which would count the backward pass that measures the norm as one of its steps. Set "
    '"ds_ext": {"gradient_policy": "sharded"} for the engine whose backward is called, which needs '
    "no such pass; or freeze the other model meanwhile (requires_grad_(False))."
)
