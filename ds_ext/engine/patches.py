"""What DeepSpeed's engine is taught when it is imported: one decorated function a method.

That our names are optimizers, that they are built from the JSON config and driven by
``ZeroAdapter``, not by DeepSpeed's own ZeRO optimizers, whose fp32 copies of weights and gradients
are what we exist to avoid; what is refused; how checkpoints are saved and loaded.
"""

import functools
import inspect
from typing import Any

from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from pydantic import ValidationError

from ds_ext.backward import fuse, owners, rehearsal, sparing
from ds_ext.config import override
from ds_ext.distributed import consensus
from ds_ext.distributed.lost import explained
from ds_ext.engine import (
    absent,
    build,
    callers,
    checks,
    expert_parallel,
    leftovers,
    names,
    op_builds,
    output_recorders,
    partition_patches,  # noqa: F401  notes its own in PATCHES
    pipeline,
    refusals,
    save_load,
    sequences,
    tiled,
    tracebacks,
)
from ds_ext.engine.adapter import ZeroAdapter
from ds_ext.engine.log import log
from ds_ext.engine.replacing import PATCHES, Method, replaces
from ds_ext.optimizer import RuleOptimizer
from ds_ext.rules import base


def register() -> None:
    """Makes DeepSpeedEngine build and drive our optimizers; calling it again changes nothing."""
    if getattr(DeepSpeedEngine, "_ds_ext", False):
        return
    DeepSpeedEngine._ds_ext = True
    base.subscribe(names.tell_deepspeed)
    # What DeepSpeed asks of its own FusedLamb (a dynamic loss scale) is not asked of ours.
    deepspeed_engine.LAMB_OPTIMIZER = "FusedLamb"
    fuse.REFUSALS.append(expert_parallel.refuse_spread_experts)
    tiled.register()
    rehearsal.HARMLESS.add(LinearFunctionForZeroStage3.__name__)  # every linear layer
    for patch in PATCHES:
        patch.apply()


@replaces(OpBuilder)
def jit_load(original: Method, builder: OpBuilder, *args: Any, **kwargs: Any) -> Any:
    """Announces what takes long in the first run of a machine."""
    op_builds.announce(builder.name)
    return original(builder, *args, **kwargs)


# How an engine is built.


@replaces(DeepSpeedConfig, "__init__")
def read(original: Method, config: DeepSpeedConfig, given: Any, *args: Any, **kwargs: Any) -> None:
    """Tells of keys and values that are wrong as ``check`` does, on one line a key."""
    with tracebacks.shown_once((ValueError, AssertionError)):
        try:
            taken = override.apply(given)
            if taken is not given:
                own, ours = (x["optimizer"].get("type") for x in (given, taken))
                _tell_replaced(own, ours)
            original(config, taken, *args, **kwargs)
        except ValidationError as error:
            raise ValueError("\n".join(checks.in_words(error))) from None
        except DeepSpeedConfigError as error:
            raise DeepSpeedConfigError(checks.with_advice(str(error))) from None


@functools.cache
def _tell_replaced(own: str, ours: str) -> None:
    """Logs once that ``run --config`` replaces the program's optimizer."""
    log(f"run --config: {ours} replaces {own} of the program's DeepSpeed config")


@replaces(DeepSpeedEngine)
def _configure_with_arguments(
    original: Method, engine: DeepSpeedEngine, args: Any, mpu: Any
) -> None:
    sequences.forget()
    engine._ds_ext_mpu = mpu  # in the place of which AutoTP puts its own
    original(engine, args, mpu)


@replaces(DeepSpeedEngine)
def _is_supported_optimizer(original: Method, engine: DeepSpeedEngine, name: str) -> Any:
    with tracebacks.shown_once():
        names.refuse_unknown(name)
    return original(engine, name)


@replaces(DeepSpeedEngine)
def _configure_distributed_model(original: Method, engine: DeepSpeedEngine, model: Any) -> None:
    # Ranks that differ are refused before they wait for each other.
    if isinstance(model, PipelineModule):
        refusals.agree_on_stages(engine, model)
    else:
        consensus.agree(refusals.facts(engine, model))
    if refusals.is_ours(engine):
        with tracebacks.shown_once():
            sequences.complete(engine, engine._ds_ext_mpu)
    owners.check_finished(model.parameters())
    with explained():
        original(engine, model)


@replaces(DeepSpeedEngine)
def _configure_optimizer(
    original: Method, engine: DeepSpeedEngine, client: Any, *args: Any, **kwargs: Any
) -> None:
    try:
        with tracebacks.shown_once(), explained():  # ZeRO-3 cuts the model here, on all ranks
            callers.refuse_dropped(client)
            if isinstance(client, RuleOptimizer):
                pipeline.keep_groups(engine, client)
            else:
                override.refuse_object(client)
            original(engine, client, *args, **kwargs)
    except Exception:
        leftovers.leave(engine)  # or the model could not be used any more
        raise


@replaces(DeepSpeedEngine)
def _configure_basic_optimizer(original: Method, engine: DeepSpeedEngine, params: list[Any]) -> Any:
    names.tell_whose(engine.optimizer_name())
    ours = names.ours(engine.optimizer_name())
    if ours:
        callers.refuse_ignored()
    if not ours:
        return original(engine, params)
    optimizer = build.optimizer_of(engine, params, ours)
    pipeline.keep_groups(engine, optimizer)
    return optimizer


@replaces(DeepSpeedEngine)
def _do_optimizer_sanity_check(
    original: Method, engine: DeepSpeedEngine, basic_optimizer: Any
) -> Any:
    ours = isinstance(basic_optimizer, RuleOptimizer)
    if ours:
        pipeline.put_groups_back(basic_optimizer)
        pipeline.on_all_stages(engine, lambda: refusals.refuse(engine, basic_optimizer))
    wrapper = ZERO_OPTIMIZATION if ours else original(engine, basic_optimizer)
    owners.take_over(p for p in engine.module.parameters() if p.requires_grad)
    return wrapper


@replaces(DeepSpeedEngine)
def _configure_zero_optimizer(original: Method, engine: DeepSpeedEngine, optimizer: Any) -> Any:
    ours = isinstance(optimizer, RuleOptimizer)
    return ZeroAdapter(engine, optimizer) if ours else original(engine, optimizer)


@replaces(DeepSpeedEngine)
def zero_force_ds_cpu_optimizer(original: Method, engine: DeepSpeedEngine) -> Any:
    """Lets DeepSpeed offload the state of an optimizer object of ours, not of its own alone."""
    return not isinstance(engine.client_optimizer, RuleOptimizer) and original(engine)


if hasattr(DeepSpeedEngine, "_configure_expert_parallel"):  # DeepSpeed 0.18 has none

    @replaces(DeepSpeedEngine)
    def _configure_expert_parallel(original: Method, *args: Any, **kwargs: Any) -> Any:
        with output_recorders.readable_by_name():
            return original(*args, **kwargs)


# Learning-rate schedulers.


@replaces(DeepSpeedEngine)
def _scheduler_from_config(original: Method, engine: DeepSpeedEngine, optimizer: Any) -> Any:
    # DeepSpeed's schedulers look inside its optimizers for torch's, torch's own do not.
    ours = isinstance(optimizer, ZeroAdapter)
    return original(engine, optimizer.optimizer if ours else optimizer)


@replaces(DeepSpeedEngine)
def _configure_lr_scheduler(original: Method, engine: DeepSpeedEngine) -> None:
    original(engine)
    if isinstance(engine.optimizer, ZeroAdapter):
        refusals.check_betas(engine.lr_scheduler, engine.optimizer.optimizer)
        engine.optimizer.tell()


@replaces(DeepSpeedEngine)
def _take_model_step(
    original: Method, engine: DeepSpeedEngine, lr_kwargs: dict[str, Any] | None
) -> None:
    if isinstance(engine.optimizer, ZeroAdapter) and engine.lr_scheduler is not None:
        refusals.check_metrics(engine.lr_scheduler, lr_kwargs or {})
    original(engine, lr_kwargs)


# Gradients that are not in ``.grad``, checkpoints, compiling, and connections that are lost.


@replaces(DeepSpeedEngine)
def zero_grad(original: Method, engine: DeepSpeedEngine) -> None:
    """Drops gradients that wait in buckets, or are kept, too."""
    original(engine)
    if isinstance(engine.optimizer, ZeroAdapter):
        engine.optimizer.zero_grad()


@replaces(DeepSpeedEngine)
def get_global_grad_norm(original: Method, engine: DeepSpeedEngine) -> Any:
    """Sees whom the norm is for."""
    if isinstance(engine.optimizer, ZeroAdapter):
        callers.tell_unclipped(engine.optimizer.fused.how.max_norm)
    return original(engine)


if hasattr(DeepSpeedEngine, "coalesce_grad_reduction"):  # DeepSpeed 0.18 has none

    @replaces(DeepSpeedEngine)
    def coalesce_grad_reduction(original: Method, engine: DeepSpeedEngine) -> Any:
        """Refuses what would keep whole gradients on each rank."""
        if isinstance(engine.optimizer, ZeroAdapter):
            raise RuntimeError(absent.COALESCE)
        return original(engine)


@replaces(DeepSpeedEngine)
def clip_fp32_gradients(original: Method, engine: DeepSpeedEngine) -> None:
    """Refuses to clip gradients that are used."""
    if isinstance(engine.optimizer, ZeroAdapter):
        raise RuntimeError(absent.CLIP)
    original(engine)


@replaces(DeepSpeedEngine)
def backward(original: Method, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
    """Refuses the learning rate that HF Trainer and LOMO's own scripts hand to backward."""
    if isinstance(engine.optimizer, ZeroAdapter) and "learning_rate" in kwargs:
        raise TypeError(
            "engine.backward() takes no learning_rate: parameters are stepped by that of their "
            'param group, which the config\'s "lr" and schedulers set. HF Trainer hands it over '
            'where TrainingArguments.optim is "lomo" or "adalomo": leave optim out.'
        )
    return original(engine, *args, **kwargs)


@replaces(DeepSpeedEngine)
def _backward_prologue(original: Method, engine: DeepSpeedEngine) -> None:
    """Refuses a measuring pass where DeepSpeed's own optimizer would take it for one of a step."""
    if sparing.measured() is not None and not isinstance(engine.optimizer, ZeroAdapter):
        raise RuntimeError(absent.MEASURED_BESIDE)
    original(engine)


@replaces(DeepSpeedEngine)
def save_checkpoint(original: Method, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
    """Saves a checkpoint that is complete, or is not there."""
    if not isinstance(engine.optimizer, ZeroAdapter):
        return original(engine, *args, **kwargs)
    return save_load.save_checkpoint(original, engine, *args, **kwargs)


@replaces(DeepSpeedEngine)
def is_first_weights_partition_group(original: Method, engine: DeepSpeedEngine) -> Any:
    """Tells DeepSpeed whether this rank writes weights that ZeRO-3 cuts: those of one copy do."""
    ours = isinstance(engine.optimizer, ZeroAdapter)
    return original(engine) and not (ours and engine.optimizer.layout.is_further_copy)


@replaces(DeepSpeedEngine)
def load_checkpoint(original: Method, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
    """Loads a checkpoint of any number of ranks and any ZeRO stage."""
    ours = isinstance(engine.optimizer, ZeroAdapter)
    return (save_load.load_checkpoint if ours else original)(engine, *args, **kwargs)


@replaces(PipelineEngine, "__init__")
def make_pipeline(original: Method, engine: PipelineEngine, *args: Any, **kwargs: Any) -> None:
    """Keeps the engine from averaging gradients, which are averaged inside backward."""
    original(engine, *args, **kwargs)
    if isinstance(engine.optimizer, ZeroAdapter):
        engine.pipeline_enable_backward_allreduce = False


@replaces(PipelineEngine, "train_batch", "eval_batch")
@replaces(DeepSpeedEngine, "forward", "backward", "step", "save_checkpoint", "load_checkpoint")
def _explained(original: Method, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(engine.optimizer, ZeroAdapter):
        return original(engine, *args, **kwargs)
    engine.optimizer.moved.check()
    with explained():
        return original(engine, *args, **kwargs)


@replaces(DeepSpeedEngine)
def compile(original: Method, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
    """Compiles the model's forward pass, and refuses to replace its backward pass."""
    given = inspect.signature(original).bind(engine, *args, **kwargs).arguments
    if isinstance(engine.optimizer, ZeroAdapter) and given.get("compiled_autograd_enabled"):
        raise ValueError(
            "engine.compile(compiled_autograd_enabled=True) replaces the backward pass, in the "
            "hooks of which ds_ext steps: leave it out; the forward pass may be compiled."
        )
    original(engine, *args, **kwargs)
