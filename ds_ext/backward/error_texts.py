"""Errors and warnings about gradients of a step that is in progress.

Fields in braces are filled in by ``str.format``; ``names`` is a ``SettingNames``.
"""

NOT_FINITE = (
    "clip_grad_norm_(error_if_nonfinite=True): the norm of the gradients is not finite. The step "
    "skips parameters with such gradients, so training can continue without this argument."
)
CLIPPED_TOGETHER = (
    "clip_grad_norm_: some of these parameters have a gradient that ds_ext does not step, and the "
    "step scales ds_ext's gradients by their own norm. Clip the others by a call of their own, "
    "freeze them, or put them into the optimizer that steps the model."
)
DROPPED_AFTER_NORM = (
    "zero_grad() of some parameters after clip_grad_norm_: the step would clip by the norm of the "
    "other gradients alone. Call zero_grad() before clip_grad_norm_, or for all parameters."
)
REPLACED = (
    "another engine or fuse_into_backward call steps this model now: use that one, or create a new "
    "one. If the two models share layers, freeze these in one of them."
)
REMOVED = (
    "remove() or engine.destroy() was called, so this object steps no longer: call loss.backward() "
    "and optimizer.step(), which do not clip, or create a new one."
)
NO_SCALES = (
    "use bf16 or fp32 for both models instead of fp16, or freeze one of them in this backward "
    "pass: model.requires_grad_(False)."
)
OTHER_SCALE = (
    "the loss is scaled for one of its models, and gradients of another one would be wrong: their "
    f"loss scales are {{other:g}} and {{own:g}}; {NO_SCALES}"
)
BEGUN = "ema() was called between backward and the end of the step: end the step first."
LOADED = (
    "load_state_dict() was called between backward and optimizer.step(): backward has already "
    "updated parameters, by the states that are replaced. Call it between steps, or keep gradients "
    'until the step: gradient_policy="sharded".'
)
EDITED = (
    "param_groups were edited between backward and the end of the step. Backward has stepped by "
    "the values before, so the edit counts from the next step on. Edit them before backward, or "
    "keep gradients until the step: {names.sharded}."
)
NOTHING = (
    "{names.step} has stepped nothing: no parameter has got a gradient since the last step. Call "
    "backward before each step. (This is said once.)"
)
WITHOUT_BATCH = (
    "{names.step} was called on this rank without a backward pass, and took part in the step of "
    "the other ranks, with gradients of 0. That is right where its batches have run out. If it "
    "goes on, it is a pass behind the others. (This is said once.)"
)
STEPPED = (
    "zero_grad() discards gradients, but backward has already updated {stepped} of {params} "
    "parameters, and these updates stay. To discard a whole batch, skip its backward pass, or keep "
    "gradients until the step: {names.sharded}."
)
WRITTEN = (
    "{param} has a gradient that did not come from backward, or that backward computed before the "
    "parameter was in param_groups. ds_ext uses gradients inside backward: do not assign .grad, "
    "and set .grad to None before you add a parameter to a group. DistributedDataParallel writes "
    ".grad too (HF Trainer wraps models in it under torchrun, also one process): do not wrap it; "
    "ds_ext averages gradients over the ranks. To step as usual after fuse_into_backward, call "
    ".remove() on the object that it returned."
)
# A function writes, in backward, to its saved tensors.
CANNOT_REPEAT = (
    "{names.clipping}: {who} overwrites its saved tensors in backward, as fused losses do "
    "(Liger's linear cross-entropy) if their result is multiplied by a factor other than 1. Exact "
    "clipping needs a second backward pass, which would be wrong. Set {names.sharded}, which clips "
    "exactly in one pass, or {names.no_clipping}."
)
# Gradients arrive before their norm was measured.
MEASURE_FIRST = (
    "{names.clipping} needs the norm of all gradients before ds_ext uses the first one: call "
    "{names.backward} instead of loss.backward(); or set {names.sharded}, which keeps this rank's "
    "part of the gradients until the step."
)
# A graph cannot run backward twice.
KEPT_FOR = (
    "{names.clipping}: {who} allows only one backward pass of a graph, so gradients are kept and "
    "clipped exactly at the step, as with {names.sharded}; "
)
_ONCE = (
    "before {names.step}. ds_ext uses and frees gradients during backward. Call backward and "
    "{names.step} once per step (sum the losses first), or keep gradients until the step with "
    "{names.accumulate}. If two checkpointed segments use the same weight other than through its "
    "module, set use_reentrant=False in checkpointing. After a backward pass that failed, or that "
    "is not to count, call zero_grad() of the whole model."
)
SECOND_GRADIENT = f"{{param}} got a second gradient {_ONCE}"
SECOND_BACKWARD = (
    f"a second gradient is asked of weights that backward has measured or updated, {_ONCE}"
)
