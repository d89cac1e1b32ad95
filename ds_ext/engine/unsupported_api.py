"""Errors for engine and optimizer APIs of DeepSpeed that ds_ext does not support."""

_CLIPPED = 'gradients are clipped inside backward: set "gradient_clipping" in the config.'


def attribute(name: str) -> AttributeError:
    """Returns the error for a missing attribute of ``engine.optimizer``."""
    return AttributeError(
        f"engine.optimizer of ds_ext has no {name}: docs/engine-api.md lists what it has, and what "
        "to use instead."
    )


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
TILED_PENALTY = (
    "DeepSpeed's tiled functions: their gradients cannot be differentiated, as a gradient penalty "
    "does (create_graph=True). Compute the penalty with layers that are not tiled."
)
MEASURED_BESIDE = (
    "gradient_clipping: this loss also reaches an engine with an optimizer of DeepSpeed's own, "
    "which would count the backward pass that measures the norm as one of its steps. Set "
    '"ds_ext": {"gradient_policy": "sharded"} for the engine whose backward is called, which needs '
    "no such pass; or freeze the other model meanwhile (requires_grad_(False))."
)
