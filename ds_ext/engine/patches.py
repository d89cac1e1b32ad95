"""Patches DeepSpeed when it is imported, with one decorated function per method.

An engine whose optimizer is of ds_ext gets the class ``OwnEngine`` before DeepSpeed builds it. Only
what happens without such an engine is patched here and in ``partition_patches``. The first line of
each patch asks whether the call concerns ds_ext, and else calls DeepSpeed's method.
"""

import functools
import inspect
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from ds_ext.backward import foreign_grads, fuse, int8_weights, norm_prepass, owners
from ds_ext.config import config_checks, optimizer_names, override, parsing
from ds_ext.distributed import groups
from ds_ext.engine import (
    deepspeed_config,
    expert_parallel,
    hook_cleanup,
    optimizers,
    own_engine,
    partition_patches,  # noqa: F401  adds its own to PATCHES
    rank_logging,
    sequence_parallel,
    tiled,
    trainer_checks,
    unsupported_api,
)
from ds_ext.engine.adapter import ZeroAdapter
from ds_ext.engine.monkeypatch import PATCHES, Method, replaces
from ds_ext.engine.own_engine import OwnEngine
from ds_ext.engine.rank_logging import log
from ds_ext.optimizer import RuleOptimizer


@functools.cache
def register() -> None:
    """Makes DeepSpeed build and drive ds_ext optimizers. Repeated calls have no effect."""
    fuse.REFUSALS += [expert_parallel.refuse_spread_experts, hook_cleanup.refuse_zero3]
    norm_prepass.HARMLESS.add(LinearFunctionForZeroStage3.__name__)  # every linear
    tiled.register()
    for patch, method in [(patch, patch.bound()) for patch in PATCHES]:
        setattr(patch.owner, patch.name, method)


# DeepSpeed has no hook before it reads a config, and reports one problem of a wrong one at a time.
@replaces(DeepSpeedConfig, "__init__")
def report_config_errors(
    original: Method, config: DeepSpeedConfig, given: Any, *args: Any, **kwargs: Any
) -> None:
    """Reports invalid keys and values as the command ``check`` does, one line per key."""
    taken = override.apply(given)
    if not optimizer_names.concerns_us(taken):
        original(config, given, *args, **kwargs)
        return
    with rank_logging.traceback_once():
        loaded = parsing.load(taken)
        if taken is not given:
            _log_replaced(*(one["optimizer"].get("type") for one in (given, taken)))
        make = functools.partial(original, config, loaded, *args, **kwargs)
        deepspeed_config.read(make, config, loaded)


@functools.cache
def _log_replaced(own: str, ours: str) -> None:
    """Logs that ``run --config`` replaces the program's optimizer, once per pair of names."""
    log(f"run --config: {ours} replaces {own} of the program's DeepSpeed config")


# DeepSpeed cannot be given a class of engines.
@replaces(DeepSpeedEngine, "__init__")
def build(original: Method, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
    """Builds an engine of our class if its optimizer is of ds_ext."""
    sequence_parallel.reset()
    given = inspect.signature(original).bind(engine, *args, **kwargs).arguments
    model, client, config = given["model"], given.get("optimizer"), given["config_class"]
    override.refuse_object(client)
    if client is not None:
        optimizers.warn_ignored_type(client, config)
    is_stored = int8_weights.is_stored(model)
    if optimizers.is_ours(client, config) or (is_stored and callable(client)):
        engine._ds_ext_mpu = given.get("mpu")  # AutoTP replaces engine.mpu
        make = functools.partial(original, engine, *args, **kwargs)
        own_engine.build(make, engine, model, client, config)
        return
    if is_stored:  # DeepSpeed would broadcast values that do not exist
        raise int8_weights.unsupported("An engine of another optimizer", "call restore_bf16 first")
    name = type(client).__name__ if client is not None else config.optimizer_name
    if name:
        _refuse_ignored(client, name, config)
    try:
        original(engine, *args, **kwargs)
        if isinstance(engine, OwnEngine):  # a function has made an optimizer of ds_ext
            own_engine.start(engine)
    except Exception:
        if isinstance(engine, OwnEngine):
            own_engine.abandon(engine)
        raise
    if name and not isinstance(engine, OwnEngine):
        trainer_checks.warn_dropped(model, name)


def _refuse_ignored(client: Any, name: str, config: DeepSpeedConfig) -> None:
    """Raises ValueError if an engine's optimizer would ignore what the program asks of ds_ext."""
    with rank_logging.traceback_once():
        if client is None:
            optimizer_names.refuse_misspelled(name)
        if "ds_ext" in config._param_dict:
            config_checks.raise_first(config_checks.unread(config._param_dict, name))


# DeepSpeed decides here how it wraps an optimizer that a function has made.
@replaces(DeepSpeedEngine)
def _do_optimizer_sanity_check(original: Method, engine: DeepSpeedEngine, optimizer: Any) -> Any:
    """Makes our engines give way to an engine of DeepSpeed's with the same parameters."""
    if isinstance(optimizer, RuleOptimizer):
        own_engine.adopt(engine)
        sequence_parallel.refuse_without_groups(engine)
        return ZERO_OPTIMIZATION
    wrapper = original(engine, optimizer)
    params = [p for p in engine.module.parameters() if p.requires_grad]
    if owners.of(params):
        owners.take_over(params, groups.alone())  # other ranks may have no such engine
    return wrapper


# DeepSpeed does not say which engines a backward pass will reach.
@replaces(DeepSpeedEngine)
def _backward_prologue(original: Method, engine: DeepSpeedEngine) -> None:
    """Rejects a norm-measuring pass through DeepSpeed's own engine, which would count a step.

    Also rejects one of an engine without an optimizer, if its config was meant for ds_ext.
    """
    if foreign_grads.measured() is not None and not isinstance(engine.optimizer, ZeroAdapter):
        raise RuntimeError(unsupported_api.MEASURED_BESIDE)
    is_inference = isinstance(engine.optimizer, DeepSpeedZeRoOffload)
    if is_inference and "ds_ext" in engine._config._param_dict:
        raise RuntimeError(unsupported_api.NO_OPTIMIZER)
    original(engine)
