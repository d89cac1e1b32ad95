"""Patches DeepSpeed's engine when it is imported, with one decorated function per method.

The patched engine accepts the names of ds_ext optimizers, builds them from the JSON config, and
drives them with ``ZeroAdapter``. DeepSpeed's own ZeRO optimizers would keep fp32 copies of weights
and gradients. Other patches reject unsupported settings, and save and load checkpoints.
"""

import functools
import inspect
import os
from pathlib import Path
from typing import Any

from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from pydantic import ValidationError

from ds_ext.backward import foreign_grads, fuse, int8_weights, norm_prepass, owners
from ds_ext.config import config_checks, override, parsing
from ds_ext.distributed.rank_failure import explained
from ds_ext.engine import (
    deepspeed_config,
    engine_checks,
    expert_parallel,
    forward,
    hook_cleanup,
    optimizers,
    partition_patches,  # noqa: F401  adds its own to PATCHES
    pipeline,
    rank_logging,
    save_load,
    schedulers,
    sequence_parallel,
    tiled,
    trainer_checks,
    unsupported_api,
)
from ds_ext.engine.adapter import ZeroAdapter
from ds_ext.engine.monkeypatch import PATCHES, Method, replaces
from ds_ext.engine.rank_logging import log
from ds_ext.optimizer import RuleOptimizer
from ds_ext.rules import base


def register() -> None:
    """Makes DeepSpeedEngine build and drive ds_ext optimizers. Repeated calls have no effect."""
    if getattr(DeepSpeedEngine, "_ds_ext", False):
        return
    DeepSpeedEngine._ds_ext = True
    base.subscribe(optimizers.register_name)
    # DeepSpeed requires dynamic loss scaling for its own FusedLamb, but ours does not need it.
    deepspeed_engine.LAMB_OPTIMIZER = "FusedLamb"
    fuse.REFUSALS.append(expert_parallel.refuse_spread_experts)
    tiled.register()
    norm_prepass.HARMLESS.add(LinearFunctionForZeroStage3.__name__)  # every linear
    for patch in PATCHES:
        patch.apply()


@replaces(OpBuilder)
def jit_load(original: Method, builder: OpBuilder, *args: Any, **kwargs: Any) -> Any:
    """Logs a message before a build, which takes minutes in the first run on a machine."""
    rank_logging.announce_build(builder.name)
    return original(builder, *args, **kwargs)


# Building an engine.


@replaces(DeepSpeedConfig, "__init__")
def read(original: Method, config: DeepSpeedConfig, given: Any, *args: Any, **kwargs: Any) -> None:
    """Reports invalid keys and values as the command ``check`` does, one line per key."""
    with rank_logging.traceback_once((ValueError, AssertionError)):
        try:
            is_file = isinstance(given, str | os.PathLike) and os.path.exists(given)
            loaded = parsing.load(Path(given)) if is_file else given
            if isinstance(loaded, dict) and (found := list(parsing.malformed(loaded))):
                raise ValueError("\n".join(found))
            taken = override.apply(given)
            if taken is not given:
                own, ours = (x["optimizer"].get("type") for x in (given, taken))
                _tell_replaced(own, ours)
            original(config, taken, *args, **kwargs)
        except (AttributeError, TypeError) as error:  # a value has a wrong type
            raise ValueError(deepspeed_config.refusal(error)) from error
        except ValidationError as error:
            raise ValueError("\n".join(deepspeed_config.format_errors(error))) from None
        except DeepSpeedConfigError as error:
            raise DeepSpeedConfigError(deepspeed_config.with_advice(str(error))) from None


@functools.cache
def _tell_replaced(own: str, ours: str) -> None:
    """Logs that ``run --config`` replaces the program's optimizer, once per pair of names."""
    log(f"run --config: {ours} replaces {own} of the program's DeepSpeed config")


@replaces(DeepSpeedEngine)
def _configure_with_arguments(
    original: Method, engine: DeepSpeedEngine, args: Any, mpu: Any
) -> None:
    sequence_parallel.reset()
    engine._ds_ext_mpu = mpu  # AutoTP replaces engine.mpu
    original(engine, args, mpu)


@replaces(DeepSpeedEngine)
def _is_supported_optimizer(original: Method, engine: DeepSpeedEngine, name: str) -> Any:
    with rank_logging.traceback_once():
        optimizers.refuse_unknown(name)
    return original(engine, name)


@replaces(DeepSpeedEngine)
def _configure_distributed_model(original: Method, engine: DeepSpeedEngine, model: Any) -> None:
    engine_checks.check_ranks(engine, model)  # first: ranks that differ would hang below
    if optimizers.is_ours(engine):
        with rank_logging.traceback_once():
            sequence_parallel.add_groups(engine, engine._ds_ext_mpu)
            forward.apply(engine, model)
    elif optimizers.is_made_later(engine):
        with rank_logging.traceback_once():
            forward.apply(engine, model)
    elif other := optimizers.name_of_other(engine):
        with rank_logging.traceback_once():
            config_checks.raise_first(parsing.unread(engine._config._param_dict, other))
    owners.check_finished(model.parameters())
    with explained():
        original(engine, model)


@replaces(DeepSpeedEngine, "_broadcast_model", "_get_shared_params")
def _with_memory(original: Method, engine: DeepSpeedEngine) -> Any:
    with int8_weights.codes_as_data(engine.module):  # to send, and to find tied weights
        return original(engine)


@replaces(DeepSpeedEngine)
def _configure_optimizer(
    original: Method, engine: DeepSpeedEngine, client: Any, *args: Any, **kwargs: Any
) -> None:
    try:
        with rank_logging.traceback_once(), explained():  # ZeRO-3 partitions the model here
            trainer_checks.refuse_dropped(client)
            if isinstance(client, RuleOptimizer):
                pipeline.stash_groups(engine, client)
            else:
                override.refuse_object(client)
            original(engine, client, *args, **kwargs)
    except Exception:
        hook_cleanup.remove_hooks(engine)  # the caller can use the model again
        raise


@replaces(DeepSpeedEngine)
def _configure_basic_optimizer(original: Method, engine: DeepSpeedEngine, params: list[Any]) -> Any:
    optimizers.log_owner(engine.optimizer_name())
    ours = optimizers.ours(engine.optimizer_name())
    if ours:
        trainer_checks.refuse_ignored()
    if not ours:
        return original(engine, params)
    optimizer = optimizers.optimizer_of(engine, params, ours)
    pipeline.stash_groups(engine, optimizer)
    return optimizer


@replaces(DeepSpeedEngine)
def _do_optimizer_sanity_check(
    original: Method, engine: DeepSpeedEngine, basic_optimizer: Any
) -> Any:
    ours = isinstance(basic_optimizer, RuleOptimizer)
    if optimizers.is_made_later(engine):
        if ours:
            sequence_parallel.refuse_without_groups(engine)
        else:
            name = type(basic_optimizer).__name__
            config_checks.raise_first(parsing.unread(engine._config._param_dict, name))
    if ours:
        pipeline.restore_groups(basic_optimizer)
        pipeline.on_all_stages(engine, lambda: engine_checks.validate(engine, basic_optimizer))
    wrapper = ZERO_OPTIMIZATION if ours else original(engine, basic_optimizer)
    owners.take_over(p for p in engine.module.parameters() if p.requires_grad)
    return wrapper


@replaces(DeepSpeedEngine)
def _configure_zero_optimizer(original: Method, engine: DeepSpeedEngine, optimizer: Any) -> Any:
    ours = isinstance(optimizer, RuleOptimizer)
    return ZeroAdapter(engine, optimizer) if ours else original(engine, optimizer)


@replaces(DeepSpeedEngine)
def zero_force_ds_cpu_optimizer(original: Method, engine: DeepSpeedEngine) -> Any:
    """Lets DeepSpeed accept offload with a ds_ext optimizer object, not only with its own."""
    return not isinstance(engine.client_optimizer, RuleOptimizer) and original(engine)


if hasattr(DeepSpeedEngine, "_configure_expert_parallel"):  # DeepSpeed 0.18 has none

    @replaces(DeepSpeedEngine)
    def _configure_expert_parallel(original: Method, *args: Any, **kwargs: Any) -> Any:
        with expert_parallel.readable_by_name():
            return original(*args, **kwargs)


# Learning-rate schedulers.


@replaces(DeepSpeedEngine)
def _scheduler_from_config(original: Method, engine: DeepSpeedEngine, optimizer: Any) -> Any:
    # DeepSpeed's schedulers unwrap ZeRO optimizers, but torch's schedulers do not.
    ours = isinstance(optimizer, ZeroAdapter)
    return original(engine, optimizer.optimizer if ours else optimizer)


@replaces(DeepSpeedEngine)
def _configure_lr_scheduler(original: Method, engine: DeepSpeedEngine) -> None:
    original(engine)
    if isinstance(engine.optimizer, ZeroAdapter):
        schedulers.check_betas(engine.lr_scheduler, engine.optimizer.optimizer)
        engine.optimizer.log_start()


@replaces(DeepSpeedEngine)
def _take_model_step(
    original: Method, engine: DeepSpeedEngine, lr_kwargs: dict[str, Any] | None
) -> None:
    if isinstance(engine.optimizer, ZeroAdapter) and engine.lr_scheduler is not None:
        schedulers.check_metrics(engine.lr_scheduler, lr_kwargs or {})
    original(engine, lr_kwargs)


# Gradients, checkpoints, compilation, and lost connections.


@replaces(DeepSpeedEngine)
def zero_grad(original: Method, engine: DeepSpeedEngine) -> None:
    """Also discards kept gradients and gradients in buckets."""
    original(engine)
    if isinstance(engine.optimizer, ZeroAdapter):
        engine.optimizer.zero_grad()


@replaces(DeepSpeedEngine)
def get_global_grad_norm(original: Method, engine: DeepSpeedEngine) -> Any:
    """Warns if accelerate asks for the norm to clip gradients to another value."""
    if isinstance(engine.optimizer, ZeroAdapter):
        trainer_checks.warn_unclipped(engine.optimizer.fused.grad_config.max_norm)
    return original(engine)


if hasattr(DeepSpeedEngine, "coalesce_grad_reduction"):  # DeepSpeed 0.18 has none

    @replaces(DeepSpeedEngine)
    def coalesce_grad_reduction(original: Method, engine: DeepSpeedEngine) -> Any:
        """Raises RuntimeError, because ds_ext keeps no full gradients on a rank."""
        if isinstance(engine.optimizer, ZeroAdapter):
            raise RuntimeError(unsupported_api.COALESCE)
        return original(engine)


@replaces(DeepSpeedEngine)
def clip_fp32_gradients(original: Method, engine: DeepSpeedEngine) -> None:
    """Raises RuntimeError, because backward has already used the gradients."""
    if isinstance(engine.optimizer, ZeroAdapter):
        raise RuntimeError(unsupported_api.CLIP)
    original(engine)


@replaces(DeepSpeedEngine)
def backward(original: Method, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
    """Rejects the ``learning_rate`` that HF Trainer and LOMO's scripts pass to backward."""
    if isinstance(engine.optimizer, ZeroAdapter) and "learning_rate" in kwargs:
        raise TypeError(
            "engine.backward() takes no learning_rate: each param group has its own, which the "
            'config\'s "lr" and schedulers set. HF Trainer passes it if TrainingArguments.optim '
            'is "lomo" or "adalomo": remove optim.'
        )
    return original(engine, *args, **kwargs)


@replaces(DeepSpeedEngine)
def _backward_prologue(original: Method, engine: DeepSpeedEngine) -> None:
    """Rejects a norm-measuring pass through DeepSpeed's own engine, which would count a step."""
    if foreign_grads.measured() is not None and not isinstance(engine.optimizer, ZeroAdapter):
        raise RuntimeError(unsupported_api.MEASURED_BESIDE)
    original(engine)


@replaces(DeepSpeedEngine)
def save_checkpoint(original: Method, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
    """Saves a complete checkpoint or none."""
    ours = isinstance(engine.optimizer, ZeroAdapter)
    return (save_load.save_checkpoint if ours else original)(engine, *args, **kwargs)


@replaces(DeepSpeedEngine)
def is_first_weights_partition_group(original: Method, engine: DeepSpeedEngine) -> Any:
    """Returns whether this rank writes ZeRO-3 partitions. Only one replica's ranks do."""
    ours = isinstance(engine.optimizer, ZeroAdapter)
    return original(engine) and not (ours and engine.optimizer.layout.is_further_replica)


@replaces(DeepSpeedEngine)
def load_checkpoint(original: Method, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
    """Loads a checkpoint that was saved with any number of ranks and any ZeRO stage."""
    ours = isinstance(engine.optimizer, ZeroAdapter)
    return (save_load.load_checkpoint if ours else original)(engine, *args, **kwargs)


@replaces(PipelineEngine, "__init__")
def make_pipeline(original: Method, engine: PipelineEngine, *args: Any, **kwargs: Any) -> None:
    """Turns off gradient averaging in the engine, because ds_ext averages inside backward."""
    original(engine, *args, **kwargs)
    if isinstance(engine.optimizer, ZeroAdapter):
        engine.pipeline_enable_backward_allreduce = False


@replaces(PipelineEngine, "train_batch", "eval_batch")
@replaces(DeepSpeedEngine, "forward", "backward", "step", "save_checkpoint", "load_checkpoint")
def _explained(original: Method, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(engine.optimizer, ZeroAdapter):
        return original(engine, *args, **kwargs)
    engine.optimizer.offloaded.check()
    with explained():
        return original(engine, *args, **kwargs)


@replaces(DeepSpeedEngine)
def compile(original: Method, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
    """Compiles the forward pass. Rejects compiled autograd, which replaces the backward pass."""
    given = inspect.signature(original).bind(engine, *args, **kwargs).arguments
    if isinstance(engine.optimizer, ZeroAdapter) and given.get("compiled_autograd_enabled"):
        raise ValueError(
            "engine.compile(compiled_autograd_enabled=True) replaces the backward pass, and "
            "ds_ext steps in its hooks: leave it out. The forward pass may be compiled."
        )
    original(engine, *args, **kwargs)
