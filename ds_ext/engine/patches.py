"""Patches DeepSpeed when it is imported, with one decorated function per method.

An engine whose optimizer is of ds_ext gets the class ``OwnEngine`` before DeepSpeed builds it. Only
what happens without such an engine is patched here. The comment above a patch says why DeepSpeed
needs it. Each patch first asks whether the call concerns ds_ext, and else calls DeepSpeed's method.
Those of 0-d parameters, with which DeepSpeed fails, do not ask.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.sequence_parallel import ulysses_sp
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init
from torch import Tensor, nn

from ds_ext.backward import foreign_grads, fuse, int8_weights, owners
from ds_ext.config import config_checks, optimizer_names, parsing
from ds_ext.distributed import groups
from ds_ext.engine import deepspeed_config, hook_cleanup, optimizers, own_engine, trainer_checks
from ds_ext.engine.adapter import ZeroAdapter
from ds_ext.engine.parameters import as_vectors, deepspeed_parameter
from ds_ext.errors import raise_all
from ds_ext.optimizer import RuleOptimizer

Method: TypeAlias = Callable[..., Any]

# Errors.
_NO_OPTIMIZER = (
    'deepspeed.initialize: the config has a section "ds_ext", but no optimizer was given. Name one '
    'in optimizer.type, such as "AdaLomo", or pass one. An engine that only evaluates a model '
    'needs no section "ds_ext": remove it.'
)
_FUNCTION = (
    "deepspeed.initialize: the optimizer is a function or a class, so ds_ext cannot check the "
    "engine before it is built: pass the optimizer, or name it in the config's optimizer.type."
)
_MEASURED_BESIDE = (
    "gradient_clipping: this loss also reaches an engine with an optimizer of DeepSpeed's own, "
    "which would count the backward pass that measures the norm as one of its steps. Set "
    '"ds_ext": {"gradient_policy": "sharded"} for the engine whose backward is called, which needs '
    "no such pass; or freeze the other model meanwhile (requires_grad_(False))."
)
_FUSED_BESIDE = (
    "engine.backward: fuse_into_backward steps parameters of this model, so the engine's optimizer "
    "would get no gradients: call .remove() on the object that it returned, or use no engine."
)
_TILED_LOSS = (
    "TiledFusedLogitsLoss computes gradients inside the forward pass, and ds_ext uses them inside "
    'backward: call the model\'s own loss, with "ds_ext": {"chunked_loss": true} in the config.'
)
_TILED_PENALTY = (
    "DeepSpeed's tiled functions: their gradients cannot be differentiated, as a gradient penalty "
    "does (create_graph=True). Compute the penalty with layers that are not tiled."
)


class Patch(NamedTuple):
    """A method of DeepSpeed, and the function that replaces it."""

    owner: type
    name: str
    function: Method


PATCHES: list[Patch] = []


def replaces(owner: type, name: str) -> Callable[[Method], Method]:
    """Returns a decorator that adds a patch to ``PATCHES``.

    Its function is called with the original method, self, and the arguments.
    """

    def note(function: Method) -> Method:
        original = getattr(owner, name)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        PATCHES.append(Patch(owner, name, method))
        return function

    return note


@functools.cache
def register() -> None:
    """Makes DeepSpeed build and drive ds_ext optimizers. Repeated calls have no effect."""
    fuse.REFUSALS.append(hook_cleanup.refuse_without_engine)
    for patch in PATCHES:
        setattr(*patch)


# DeepSpeed has no hook before it reads a config, and reports one problem of a wrong one at a time.
@replaces(DeepSpeedConfig, "__init__")
def report_config_errors(
    original: Method, config: DeepSpeedConfig, given: Any, *args: Any, **kwargs: Any
) -> None:
    """Reports invalid keys and values as the command ``check`` does, one line per key."""
    if not optimizer_names.concerns_us(given):
        original(config, given, *args, **kwargs)
        return
    loaded = parsing.load(given)
    make = functools.partial(original, config, loaded, *args, **kwargs)
    deepspeed_config.read(make, loaded)


# DeepSpeed cannot be given a class of engines.
@replaces(DeepSpeedEngine, "__init__")
def build(original: Method, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
    """Builds an engine of our class if its optimizer is of ds_ext."""
    passed = inspect.signature(original).bind(engine, *args, **kwargs).arguments
    model, client, config = passed["model"], passed.get("optimizer"), passed["config_class"]
    if client is not None:
        optimizers.warn_ignored_type(client, config)
    is_stored = int8_weights.is_stored(model)
    is_function = callable(client) and not isinstance(client, torch.optim.Optimizer)
    if is_function and ("ds_ext" in config._param_dict or is_stored):
        raise ValueError(_FUNCTION)
    is_named = client is None and optimizer_names.registry_key(config.optimizer_name)
    if is_named or isinstance(client, RuleOptimizer):
        make = functools.partial(original, engine, *args, **kwargs)
        own_engine.build(make, engine, model, client, config, passed.get("mpu"))
        return
    if is_stored:  # DeepSpeed would broadcast values that do not exist
        raise int8_weights.unsupported("An engine of another optimizer", "call restore_bf16 first")
    named = parsing.lookup(config._param_dict, "optimizer.type")
    name = type(client).__name__ if client is not None else named
    if name and client is None:
        optimizer_names.refuse_misspelled(name)
    if "ds_ext" in config._param_dict and not name:
        raise ValueError(_NO_OPTIMIZER)
    if name and (client is None or "ds_ext" in config._param_dict):
        raise_all(config_checks.unread(config._param_dict, name))
    original(engine, *args, **kwargs)
    if name:
        trainer_checks.warn_dropped(model, name)


# DeepSpeed tells nobody that a new engine steps the parameters of an older one.
@replaces(DeepSpeedEngine, "_do_optimizer_sanity_check")
def _do_optimizer_sanity_check(original: Method, engine: DeepSpeedEngine, optimizer: Any) -> Any:
    """Makes our engines give way to an engine of DeepSpeed's with the same parameters."""
    if isinstance(optimizer, RuleOptimizer):  # made by a function: others have no class of ours
        hook_cleanup.remove_hooks(engine)
        raise ValueError(_FUNCTION)
    wrapper = original(engine, optimizer)
    params = [p for p in engine.module.parameters() if p.requires_grad]
    if owners.of(params):
        owners.take_over(params, groups.alone())  # other ranks may have no such engine
    return wrapper


# DeepSpeed does not say which engines a backward pass will reach, nor who else takes gradients.
@replaces(DeepSpeedEngine, "_backward_prologue")
def _backward_prologue(original: Method, engine: DeepSpeedEngine) -> None:
    """Rejects passes of DeepSpeed's own engine that measure a norm, or whose gradients we take."""
    if not isinstance(engine.optimizer, ZeroAdapter):
        if foreign_grads.measured() is not None:
            raise RuntimeError(_MEASURED_BESIDE)
        if owners.stepping(engine.module.parameters()):
            raise RuntimeError(_FUSED_BESIDE)
    original(engine)


# It runs backward inside forward, and tells no hook of a weight that the loss may still be scaled.
@replaces(ulysses_sp.TiledFusedLogitsLoss, "forward")
def refuse_gradients_in_forward(original: Method, ctx: Any, *args: Any) -> Any:
    """Rejects DeepSpeed's tiled loss with weights that ds_ext steps."""
    if owners.of(_weights(args)):
        raise RuntimeError(_TILED_LOSS)
    return original(ctx, *args)


# Their backward pass runs another one for each tile, whose gradients cannot be differentiated.
@replaces(ulysses_sp.SequenceTiledCompute, "backward")
@replaces(ulysses_sp.TiledMLP, "backward")
def refuse_gradient_penalty(original: Method, ctx: Any, *grads: Any) -> Any:
    """Rejects ``autograd.grad(…, create_graph=True)`` through tiles with weights of ds_ext."""
    if torch.is_grad_enabled() and owners.of(ctx.compute_params):
        raise RuntimeError(_TILED_PENALTY)
    return original(ctx, *grads)


# Each tile brings a part of a weight's gradient, and they tell no hook which is the last.
@replaces(ulysses_sp.SequenceTiledCompute, "forward")
@replaces(ulysses_sp.TiledMLP, "forward")
def wait_for_tiles(original: Method, ctx: Any, *args: Any) -> Any:
    """Lets the weights of a tiled function wait for the end of backward."""
    params = _weights(args)
    for owner in owners.of(params):
        owner.uses.expect_parts(params)
    return original(ctx, *args)


def _weights(args: Sequence[Any]) -> list[Tensor]:
    """The weights in a tiled function's arguments: those of modules, and those in lists."""
    found: list[Tensor] = []
    for arg in args:
        if isinstance(arg, nn.Module):
            found += arg.parameters()
        elif isinstance(arg, (list, tuple)):
            found += [x for x in arg if isinstance(x, Tensor)]
    return found


# ZeRO-3's contexts, which belong to no engine.


# DeepSpeed broadcasts bytes, which fails for 0-d parameters.
@replaces(Init, "_zero_init_param")
def partition_scalars(original: Method, init: Init, param: Tensor) -> None:
    """Partitions 0-d parameters too."""
    shape = param.shape
    with as_vectors([param]):
        original(init, param)
    deepspeed_parameter(param).ds_shape = shape  # the shape after a gather


# The same for the broadcast of an edit.
@replaces(GatheredParameters, "__exit__")
def broadcast_scalars(original: Method, gathered: GatheredParameters, *error: Any) -> None:
    """Broadcasts edits of 0-d parameters too."""
    with as_vectors(gathered.params if gathered.enabled else []):
        original(gathered, *error)
