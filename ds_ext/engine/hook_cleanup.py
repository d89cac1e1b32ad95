"""Removes what DeepSpeed's engines leave on a model, and refuses models with such remains."""

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_ext.backward import owners
from ds_ext.engine import expert_parallel

# Classes of DeepSpeed that define hooks.
_THEIRS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeRoOffload")


def remove_hooks(engine: DeepSpeedEngine) -> None:
    """Removes the engine's own hooks from its model."""
    for name in ("module_forward_pre_hook", "module_forward_post_hook"):
        if (hook := vars(engine).get(name)) is not None:  # an engine that failed early has none
            hook.remove()


def refuse_other_engines(model: nn.Module) -> None:
    """Raises ValueError if another engine, whose optimizer is not ours, has hooks on the model."""
    hooks = [*model._forward_pre_hooks.values()]
    for param in model.parameters():
        hooks += (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()
    if any(getattr(hook, "__qualname__", "").startswith(_THEIRS) for hook in hooks):
        raise ValueError(
            "the model still has the hooks of another DeepSpeed engine, whose optimizer is not "
            "ds_ext's: call destroy() of that engine first."
        )


def refuse_partitions(engine: DeepSpeedEngine) -> None:
    """Raises ValueError if parameters are partitioned below ZeRO stage 3."""
    stage = int(engine.zero_optimization_stage())
    if stage < 3 and _is_partitioned(engine.module):
        raise ValueError(
            f"zero_optimization.stage = {stage}: the model's parameters are partitioned, by "
            "deepspeed.zero.Init or by an engine at stage 3: set stage 3, or load the model anew."
        )


def refuse_without_engine(model: nn.Module) -> None:
    """Raises ValueError if only an engine can train the model of ``fuse_into_backward``."""
    if _is_partitioned(model):
        todo = (
            "which only a DeepSpeed engine can train: pass the optimizer to deepspeed.initialize, "
            "or load the model anew without ZeRO-3."
        )
        if owners.of(model.parameters()):
            todo = "and its engine steps inside backward already: remove the call."
        raise ValueError(f"fuse_into_backward: ZeRO-3 has partitioned this model, {todo}")
    if any(map(expert_parallel.is_expert, model.parameters())):
        raise ValueError(
            "fuse_into_backward: the model has experts that DeepSpeed spreads over ranks. Only its "
            "engine knows which rank has which: use deepspeed.initialize."
        )
    refuse_other_engines(model)


def _is_partitioned(model: nn.Module) -> bool:
    return any(hasattr(p, "ds_tensor") for p in model.parameters())
