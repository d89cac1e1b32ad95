"""Registration with DeepSpeed: what DeepSpeedEngine is taught when ds_ext is imported.

That our names are optimizers, how to build one from the JSON config, what is refused, and that
ours is driven by ``ZeroAdapter`` and not by DeepSpeed's own ZeRO optimizers, whose fp32 copies of
weights and gradients are what we exist to avoid.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init
from torch import Tensor
from torch._dynamo import OptimizedModule

from ds_ext import param_groups, rules
from ds_ext.backward import fuse, owners, settings
from ds_ext.config import offload
from ds_ext.distributed import consensus
from ds_ext.distributed.lost import explained
from ds_ext.distributed.wrapped import refuse_wrapped
from ds_ext.engine import expert_parallel, leftovers, save_load, tiled
from ds_ext.engine.adapter import ZeroAdapter, effective, log
from ds_ext.engine.autotp import EMBEDDINGS, LINEARS, unpartitioned_shape, whole_shape
from ds_ext.engine.parameters import deepspeed_parameter
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer

# Names that DeepSpeed knew without ds_ext, and what it made of them.
_TAKEN_OVER = {
    "adafactor": "torch.optim's, whose state DeepSpeed leaves full-sized and unfactored",
    "lamb": "DeepSpeed's FusedLamb",
}


def register() -> None:
    """Makes DeepSpeedEngine build and drive our optimizers; calling it again changes nothing."""
    if getattr(DeepSpeedEngine, "_ds_ext", False):
        return
    DeepSpeedEngine._ds_ext = True
    rules.base.subscribe(_name_to_deepspeed)
    # What DeepSpeed asks of its own FusedLamb (a dynamic loss scale) is not asked of ours.
    deepspeed_engine.LAMB_OPTIMIZER = "FusedLamb"
    fuse.REFUSALS.append(expert_parallel.refuse_spread_experts)
    _accept_scalars()
    _accept_objects()
    _save_and_load()
    _end_with_the_others()
    _discard()
    _keep_backward()
    tiled.register()
    configure, build, check, wrap, make_scheduler, schedule, take_step = (
        DeepSpeedEngine._configure_optimizer,
        DeepSpeedEngine._configure_basic_optimizer,
        DeepSpeedEngine._do_optimizer_sanity_check,
        DeepSpeedEngine._configure_zero_optimizer,
        DeepSpeedEngine._scheduler_from_config,
        DeepSpeedEngine._configure_lr_scheduler,
        DeepSpeedEngine._take_model_step,
    )

    @functools.wraps(configure)
    def _configure_optimizer(self: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
        try:
            configure(self, *args, **kwargs)
        except Exception:
            leftovers.leave(self)  # or the model could not be used any more
            raise

    @functools.wraps(build)
    def _configure_basic_optimizer(self: DeepSpeedEngine, model_parameters: list[Any]) -> Any:
        if self.optimizer_name() not in OPTIMIZERS:
            return build(self, model_parameters)
        return _build(self, _ungrouped(self, model_parameters))

    @functools.wraps(check)
    def _do_optimizer_sanity_check(self: DeepSpeedEngine, basic_optimizer: Any) -> Any:
        ours = isinstance(basic_optimizer, RuleOptimizer)
        if ours:
            _refuse(self, basic_optimizer)
        wrapper = ZERO_OPTIMIZATION if ours else check(self, basic_optimizer)
        owners.take_over(p for p in self.module.parameters() if p.requires_grad)
        return wrapper

    @functools.wraps(wrap)
    def _configure_zero_optimizer(self: DeepSpeedEngine, optimizer: Any) -> Any:
        ours = isinstance(optimizer, RuleOptimizer)
        return ZeroAdapter(self, optimizer) if ours else wrap(self, optimizer)

    @functools.wraps(make_scheduler)
    def _scheduler_from_config(self: DeepSpeedEngine, optimizer: Any) -> Any:
        # DeepSpeed's schedulers look inside its optimizers for torch's, torch's own do not.
        ours = isinstance(optimizer, ZeroAdapter)
        return make_scheduler(self, optimizer.optimizer if ours else optimizer)

    @functools.wraps(schedule)
    def _configure_lr_scheduler(self: DeepSpeedEngine) -> None:
        schedule(self)
        if isinstance(self.optimizer, ZeroAdapter):
            _check_betas(self.lr_scheduler, self.optimizer.optimizer)

    @functools.wraps(take_step)
    def _take_model_step(self: DeepSpeedEngine, lr_kwargs: dict[str, Any] | None) -> None:
        if isinstance(self.optimizer, ZeroAdapter) and self.lr_scheduler is not None:
            _check_metrics(self.lr_scheduler, lr_kwargs or {})
        take_step(self, lr_kwargs)

    DeepSpeedEngine._configure_optimizer = _configure_optimizer
    DeepSpeedEngine._configure_basic_optimizer = _configure_basic_optimizer
    DeepSpeedEngine._do_optimizer_sanity_check = _do_optimizer_sanity_check
    DeepSpeedEngine._configure_zero_optimizer = _configure_zero_optimizer
    DeepSpeedEngine._scheduler_from_config = _scheduler_from_config
    DeepSpeedEngine._configure_lr_scheduler = _configure_lr_scheduler
    DeepSpeedEngine._take_model_step = _take_model_step


def _name_to_deepspeed(name: str) -> None:
    """Lets a DeepSpeed config name an optimizer, in any case."""
    if name not in DEEPSPEED_OPTIMIZERS:
        DEEPSPEED_OPTIMIZERS.append(name)


def _save_and_load() -> None:
    """Makes saving and loading ours where the optimizer is."""
    save, load = DeepSpeedEngine.save_checkpoint, DeepSpeedEngine.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(self: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.optimizer, ZeroAdapter):
            return save(self, *args, **kwargs)
        return save_load.save_checkpoint(save, self, *args, **kwargs)

    @functools.wraps(load)
    def load_checkpoint(self: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
        ours = isinstance(self.optimizer, ZeroAdapter)
        return (save_load.load_checkpoint if ours else load)(self, *args, **kwargs)

    DeepSpeedEngine.save_checkpoint = save_checkpoint
    DeepSpeedEngine.load_checkpoint = load_checkpoint


def _end_with_the_others() -> None:
    """Refuses ranks that differ before they wait for each other, and explains a lost one."""
    configure = DeepSpeedEngine._configure_distributed_model

    @functools.wraps(configure)
    def _configure_distributed_model(self: DeepSpeedEngine, model: Any) -> None:
        if not isinstance(model, PipelineModule):  # its ranks have different layers
            consensus.agree(_facts(self, model))
        owners.check_finished(model.parameters())
        with explained():
            configure(self, model)

    def explaining(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self.optimizer, ZeroAdapter):
                return method(self, *args, **kwargs)
            with explained():
                return method(self, *args, **kwargs)

        return call

    DeepSpeedEngine._configure_distributed_model = _configure_distributed_model
    for name in ("forward", "backward", "step", "save_checkpoint", "load_checkpoint"):
        setattr(DeepSpeedEngine, name, explaining(getattr(DeepSpeedEngine, name)))


def _discard() -> None:
    """Lets engine.zero_grad() drop gradients that are not in ``.grad``."""
    zero_grad = DeepSpeedEngine.zero_grad

    @functools.wraps(zero_grad)
    def call(self: DeepSpeedEngine) -> None:
        zero_grad(self)
        if isinstance(self.optimizer, ZeroAdapter):
            self.optimizer.zero_grad()

    DeepSpeedEngine.zero_grad = call


def _keep_backward() -> None:
    """Lets engine.compile() compile the model, and refuses it the backward pass."""
    compile_model = DeepSpeedEngine.compile

    @functools.wraps(compile_model)
    def compile(self: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(compile_model).bind(self, *args, **kwargs).arguments
        if isinstance(self.optimizer, ZeroAdapter) and given.get("compiled_autograd_enabled"):
            raise ValueError(
                "engine.compile(compiled_autograd_enabled=True) replaces the backward pass, in the "
                "hooks of which ds_ext steps: leave it out; the forward pass may be compiled."
            )
        compile_model(self, *args, **kwargs)

    DeepSpeedEngine.compile = compile


# What may differ from rank to rank: it is about what is written and shown.
_LOCAL = {
    *("tensorboard", "wandb", "csv_monitor", "comet", "steps_per_print", "dump_state"),
    *("wall_clock_breakdown", "memory_breakdown", "flops_profiler", "comms_logger"),
}


def _facts(engine: DeepSpeedEngine, model: Any) -> dict[str, Any]:
    """What all ranks must have been started with alike, if one of them uses ds_ext."""
    client = engine.client_optimizer
    ours = isinstance(client, RuleOptimizer)
    name = type(client).__name__ if client is not None else engine.optimizer_name()
    if not ours and name not in OPTIMIZERS:
        return {"optimizer": name}
    config = {k: v for k, v in engine._config._param_dict.items() if k not in _LOCAL}
    told = consensus.facts(model, client if ours else None, whole_shape)
    return {"optimizer": name, "config": config, **told}


def _ungrouped(engine: DeepSpeedEngine, params: list[Any]) -> list[Any]:
    """Parameters as the user gave them: DeepSpeed puts a flat list with experts into groups."""
    if not engine.has_moe_layers or params[0].get("name") != "dense-params":
        return params
    given = {p for group in params for p in group["params"]}
    return [p for p in engine.param_names if p in given]


def _build(engine: DeepSpeedEngine, params: list[Any]) -> RuleOptimizer:
    """The optimizer that the JSON config names, over groups that spare norms and biases."""
    optimizer_type = OPTIMIZERS[engine.optimizer_name()]
    if engine.optimizer_name() in _TAKEN_OVER:
        log(f"{optimizer_type.__name__} is ds_ext's, not {_TAKEN_OVER[engine.optimizer_name()]}")
    given = dict(engine.optimizer_params() or {})
    is_galore = engine.optimizer_name() == "galoreadamw"
    targets = given.pop("target_modules", "all-linear") if is_galore else None
    grouped = bool(params) and isinstance(params[0], dict)
    checked = optimizer_type.check(given)
    if checked["weight_decay"] and not grouped:
        groups = param_groups.decay_groups(
            engine.module, params, checked["weight_decay"], unpartitioned_shape
        )
        params = [group for group in groups if group["params"]]
        log(_decay_report(engine, params))
    if is_galore:
        params = param_groups.galore_groups(
            engine.module, params, targets, LINEARS, EMBEDDINGS, unpartitioned_shape
        )
        projected = [p for g in params if "rank" not in g for p in g["params"]]
        names = param_groups.summary(engine.param_names[p] for p in projected)
        log(f"GaLore projects the gradients of: {names}")
    return optimizer_type(params, **checked)


def _decay_report(engine: DeepSpeedEngine, groups: list[dict[str, Any]]) -> str:
    def names(decayed: bool) -> str:
        chosen = [g["params"] for g in groups if bool(g["weight_decay"]) == decayed]
        params = [p for group in chosen for p in group if p.requires_grad]
        return param_groups.summary(engine.param_names[p] for p in params)

    decay = groups[0]["weight_decay"]
    return f"weight decay {decay} on: {names(True)}; no weight decay on: {names(False)}"


def _refuse(engine: DeepSpeedEngine, optimizer: RuleOptimizer) -> None:
    """Raises ValueError for what this engine was asked to do and ds_ext cannot."""
    leftovers.refuse_gradient_hooks(engine)
    leftovers.refuse_partitions(engine)
    refuse_wrapped(engine.module)
    config = engine._config._param_dict | effective(engine)
    settings.refuse(config)
    settings.gradients(config)
    firsts = {id(optimizer.group_of[p]): p for p in optimizer.group_of}.values()
    offload.check(config, map(optimizer.rule_of, firsts), {p.dtype for p in optimizer.group_of})
    if isinstance(engine.module, PipelineModule):
        raise ValueError("ds_ext does not support PipelineModule: pass a plain nn.Module.")
    if engine.autotp_size() > 1 and engine.sequence_parallel_size > 1:
        raise ValueError(
            "ds_ext cannot honour tensor_parallel.autotp_size together with sequence_parallel_size "
            "yet: remove one of them."
        )
    compiled = any(isinstance(m, OptimizedModule) for m in engine.module.modules())
    if compiled and engine.zero_optimization_stage() == 3:
        raise ValueError(
            "zero_optimization.stage = 3 cannot partition what torch.compile has wrapped: give "
            "deepspeed.initialize the model itself, and call engine.compile() after it."
        )
    if engine.has_moe_layers:
        _refuse_experts(engine)
    scheduled = engine.client_lr_scheduler is not None or engine.scheduler_name() is not None
    if scheduled and any(group["lr"] is None for group in optimizer.param_groups):
        raise ValueError(
            "Adafactor: optimizer.params.relative_step=true computes its own step size, so there "
            'is no lr for a scheduler to set. Set "relative_step": false and an "lr" (HF Trainer '
            "always has a scheduler), or remove the scheduler."
        )


def _refuse_experts(engine: DeepSpeedEngine) -> None:
    """Raises ValueError for experts spread in a way that is not supported."""
    if max(engine.autotp_size(), engine.mp_world_size, engine.sequence_parallel_size) > 1:
        raise ValueError(
            "ds_ext does not support expert_parallel, or deepspeed.moe layers, together with "
            "tensor or sequence parallelism yet: remove tensor_parallel, sequence_parallel_size "
            "and mpu."
        )
    native = any(isinstance(module, MoE) for module in engine.module.modules())
    if native and engine.zero_optimization_stage() == 3:
        raise ValueError(
            "zero_optimization.stage = 3: DeepSpeed does not partition deepspeed.moe layers. Use "
            'stage 0, 1 or 2, or "expert_parallel" (AutoEP) with the experts of the model itself.'
        )


def _check_betas(scheduler: Any, optimizer: RuleOptimizer) -> None:
    """Raises ValueError if a scheduler has set too few betas: DeepSpeed's OneCycle, with CAME."""
    needed = len(optimizer.defaults.get("betas", ()))
    for group in optimizer.param_groups:
        if len(group.get("betas", ())) != needed:
            raise ValueError(
                f"{type(optimizer).__name__} has {needed} betas; {type(scheduler).__name__} sets "
                f'{group["betas"]}: put "cycle_momentum": false into scheduler.params.'
            )


def _check_metrics(scheduler: Any, given: dict[str, Any]) -> None:
    """Raises ValueError for a scheduler whose metric, missing, would be the batch size."""
    if "metrics" in inspect.signature(scheduler.step).parameters and "metrics" not in given:
        raise ValueError(
            f"{type(scheduler).__name__} needs a metric, for which DeepSpeed would take the batch "
            'size: call engine.step(lr_kwargs={"metrics": ...}), or step it yourself and keep it '
            "from DeepSpeed. In HF Trainer, choose another lr_scheduler_type."
        )


def _accept_objects() -> None:
    """Lets DeepSpeed offload the state of an optimizer object of ours, and not of its own alone."""
    force = DeepSpeedEngine.zero_force_ds_cpu_optimizer

    @functools.wraps(force)
    def zero_force_ds_cpu_optimizer(self: DeepSpeedEngine) -> Any:
        return not isinstance(self.client_optimizer, RuleOptimizer) and force(self)

    DeepSpeedEngine.zero_force_ds_cpu_optimizer = zero_force_ds_cpu_optimizer


def _accept_scalars() -> None:
    """Lets DeepSpeed 0.19 take 0-d parameters: it broadcasts bytes, as which they have no view."""
    broadcast, convert, leave = (
        DeepSpeedEngine._broadcast_model,
        Init._zero_init_param,
        GatheredParameters._exit,
    )

    @functools.wraps(broadcast)
    def _broadcast_model(self: DeepSpeedEngine) -> None:
        with _as_vectors(self.module.parameters()):
            broadcast(self)

    @functools.wraps(convert)
    def _zero_init_param(self: Init, param: Tensor) -> None:
        shape = param.shape
        with _as_vectors([param]):
            convert(self, param)
        deepspeed_parameter(param).ds_shape = shape  # in which it is gathered

    @functools.wraps(leave)
    def _exit(self: GatheredParameters, *error: Any) -> None:
        with _as_vectors(self.params if self.enabled else []):
            leave(self, *error)

    DeepSpeedEngine._broadcast_model = _broadcast_model
    Init._zero_init_param = _zero_init_param
    GatheredParameters._exit = _exit


@contextlib.contextmanager
def _as_vectors(params: Iterable[Tensor]) -> Iterator[None]:
    """Gives 0-d parameters one dimension within the context."""
    scalars = [p for p in params if p.dim() == 0]
    for param in scalars:
        param.data = param.data.view(1)
    yield
    for param in scalars:
        if param.numel():  # not partitioned meanwhile
            param.data = param.data.view(())
