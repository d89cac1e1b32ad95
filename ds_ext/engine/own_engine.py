"""The class of engines that a ds_ext optimizer steps: DeepSpeed's class with other methods.

DeepSpeed offers no hook for what these methods do. Overriding them in a subclass leaves the methods
of all other engines alone. Each method says what DeepSpeed lacks.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_ext.backward import int8_weights, owners
from ds_ext.config.optimizer_names import PREFIX
from ds_ext.distributed import consensus
from ds_ext.distributed.groups import explained, with_attribute
from ds_ext.engine import (
    deepspeed_config,
    engine_checks,
    forward,
    hook_cleanup,
    optimizers,
    pipeline,
    trainer_checks,
)
from ds_ext.engine.adapter import ZeroAdapter
from ds_ext.engine.expert_parallel import readable_by_name
from ds_ext.engine.loading import load_checkpoint
from ds_ext.engine.parameters import as_vectors, unpartitioned_shape
from ds_ext.engine.rank_logging import warn
from ds_ext.engine.saving import save_checkpoint
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer
from ds_ext.rules.base import key_of

# The functions of DeepSpeed, HF Trainer and accelerate that gather full weights at stage 3.
GATHERING = "save_16bit_model (Trainer.save_model, accelerator.get_state_dict)"
# Methods of engines and pipeline engines that communicate.
COMMUNICATING = (
    *("forward", "backward", "step", "train_batch", "eval_batch"),
    *("save_checkpoint", "load_checkpoint", "_zero3_consolidated_16bit_state_dict"),
)


@functools.cache
def _class_for(base: Any) -> type:
    """The class of our engines, with the name of the engine's own class."""
    own = type(base.__name__, (OwnEngine, base), {"__module__": __name__})
    for name in COMMUNICATING:
        if hasattr(own, name):
            setattr(own, name, _translate_lost_connections(name, getattr(own, name)))
    return own


def build(
    make: Callable[[], None],
    engine: DeepSpeedEngine,
    model: nn.Module,
    client: Any,
    config: DeepSpeedConfig,
    mpu: Any,
) -> None:
    """Builds an engine that a ds_ext optimizer will step. All ranks must call it.

    DeepSpeed's constructor is ``make``. ``client`` is None if the config names the optimizer.

    Raises:
        ValueError: ds_ext cannot step this model with these settings. The model can be used again.
    """
    kind: Any = type(engine)
    engine.__class__ = _class_for(kind)
    with explained():
        try:
            engine_checks.check_ranks(model, client, config)  # first: DeepSpeed would hang
            engine_checks.check_sequences(config, mpu)
            owners.check_finished(model.parameters())
            if client is None:  # DeepSpeed demands settings of its own LAMB
                config.optimizer_name = PREFIX + key_of(config.optimizer_name)
            make()
            ours, scheduler = engine.optimizer.optimizer, type(engine.lr_scheduler).__name__
            deepspeed_config.refuse_betas(ours, scheduler, ours.param_groups)
        except Exception:  # the model can be used again
            if isinstance(engine.__dict__.get("optimizer"), ZeroAdapter):
                engine.optimizer.destroy()
            hook_cleanup.remove_hooks(engine)
            raise
        engine.optimizer.log_start()


def _translate_lost_connections(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a method that communicates, so that its errors name a lost connection."""

    @functools.wraps(method)
    def call(engine: "OwnEngine", *args: Any, **kwargs: Any) -> Any:
        engine.optimizer.offloaded.check(name)
        with explained():
            return method(engine, *args, **kwargs)

    return call


class OwnEngine(DeepSpeedEngine):  # type: ignore[misc]  # deepspeed has no types
    """Methods that differ from DeepSpeed's. The other base of an engine's class is its own."""

    # Building an engine.

    def _is_supported_optimizer(self, name: str) -> bool:
        return True  # DeepSpeed has a fixed list, and takes other names for torch's

    def _configure_expert_parallel(self, *args: Any, **kwargs: Any) -> Any:
        with readable_by_name():  # DeepSpeed 0.19.8 fails with transformers 5.23
            return super()._configure_expert_parallel(*args, **kwargs)

    def _configure_distributed_model(self, model: nn.Module) -> None:
        forward.apply(self, model)  # DeepSpeed knows no pieces of a batch
        super()._configure_distributed_model(model)

    def _broadcast_model(self) -> None:
        # DeepSpeed broadcasts bytes, which fails for 0-d tensors, and knows no codes.
        params = list(self.module.parameters())
        with int8_weights.codes_as_data(self.module), as_vectors(params):
            super()._broadcast_model()

    def _configure_optimizer(self, client: Any, params: list[Any]) -> None:
        # DeepSpeed wraps only optimizers that it knows, and drops empty groups of a stage.
        if client is None:
            trainer_checks.refuse_ignored(self.client_lr_scheduler)
            rule = OPTIMIZERS[key_of(self.optimizer_name())].hypers
            given = self.optimizer_params() or {}
            trainer_checks.warn_unread(self.client_lr_scheduler, rule, given)
            optimizers.log_owner(self.optimizer_name())
            client = optimizers.optimizer_of(self, params)
        if not pipeline.is_pipeline(self):  # stages must agree on the number of groups
            client.param_groups[:] = [group for group in client.param_groups if group["params"]]
            told = consensus.facts(self.module, client, unpartitioned_shape)["parameter group"]
            consensus.require_equal({"parameter group": told})  # of ``params``, too
        self._check_for_duplicates(client)
        self.basic_optimizer = client
        self.optimizer = self._configure_zero_optimizer(client)

    def _configure_zero_optimizer(self, optimizer: RuleOptimizer) -> ZeroAdapter:
        consensus.run_on_all_ranks(lambda: engine_checks.validate(self, optimizer), ValueError)
        owners.take_over(p for p in self.module.parameters() if p.requires_grad)
        hook_cleanup.refuse_other_engines(self.module)
        return ZeroAdapter(self, optimizer)

    def _get_shared_params(self) -> Any:
        with int8_weights.codes_as_data(self.module):  # tied weights are found by their memory
            return super()._get_shared_params()

    # Learning-rate schedulers.

    def _scheduler_from_config(self, optimizer: ZeroAdapter) -> Any:
        # torch's schedulers accept only instances of torch.optim.Optimizer.
        with deepspeed_config.scheduler_errors(self.scheduler_name()):
            return super()._scheduler_from_config(optimizer.optimizer)

    def _take_model_step(self, lr_kwargs: dict[str, Any] | None) -> None:
        if self.lr_scheduler is not None:  # DeepSpeed would pass the batch size as a metric
            engine_checks.check_metrics(self.lr_scheduler, lr_kwargs or {})
        with with_attribute(self.optimizer, "is_stepping", True):
            super()._take_model_step(lr_kwargs)

    # Training.

    @functools.wraps(DeepSpeedEngine.backward)
    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Rejects the ``learning_rate`` that HF Trainer and LOMO's scripts pass to backward."""
        if "learning_rate" in kwargs or any(isinstance(x, float) for x in args[1:]):
            raise TypeError(
                "engine.backward() takes no learning_rate: each param group has its own, which "
                'the config\'s "lr" and schedulers set. HF Trainer passes it if '
                'TrainingArguments.optim is "lomo" or "adalomo": remove optim.'
            )
        return super().backward(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Also discards kept gradients and gradients in buckets. DeepSpeed sets ``.grad`` only."""
        super().zero_grad(*args, **kwargs)
        self.optimizer.zero_grad()

    def allreduce_gradients(self, *_: Any, **__: Any) -> None:
        """Does nothing, because backward has reduced gradients. DeepSpeed writes to ``.grad``."""

    def coalesce_grad_reduction(self) -> Any:
        """Raises RuntimeError, because ds_ext keeps no full gradients on a rank."""
        raise RuntimeError(
            "engine.coalesce_grad_reduction(): gradients are reduced inside each backward. To add "
            "up several backward passes, call engine.set_gradient_accumulation_boundary(False) "
            'before all of them but the last, or set "gradient_accumulation_steps".'
        )

    def get_global_grad_norm(self) -> float | None:
        """Also warns about a call of ``accelerator.clip_grad_norm_``, which has no effect."""
        trainer_checks.warn_unclipped(self.optimizer.fused.grad_config.max_norm)
        norm: float | None = super().get_global_grad_norm()
        return norm

    def clip_fp32_gradients(self) -> None:
        """Raises RuntimeError, because backward has already used the gradients."""
        raise RuntimeError(
            "engine.clip_fp32_gradients(): gradients are clipped inside backward: set "
            '"gradient_clipping" in the config.'
        )

    @functools.wraps(DeepSpeedEngine.compile)
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Rejects compiled autograd, which replaces the backward pass."""
        compile_ = super().compile
        given = inspect.signature(compile_).bind(*args, **kwargs).arguments
        if given.get("compiled_autograd_enabled"):
            raise ValueError(
                "engine.compile(compiled_autograd_enabled=True) replaces the backward pass, and "
                "ds_ext steps in its hooks: leave it out. The forward pass may be compiled."
            )
        compile_(*args, **kwargs)

    # Checkpoints.

    save_checkpoint = save_checkpoint
    load_checkpoint = load_checkpoint

    @functools.wraps(DeepSpeedEngine.save_16bit_model)
    def save_16bit_model(self, *args: Any, **kwargs: Any) -> bool:
        """Also warns if nothing was saved."""
        saved: bool = super().save_16bit_model(*args, **kwargs)
        if not saved:
            warn(
                "save_16bit_model has saved nothing: set "
                '"stage3_gather_16bit_weights_on_model_save": true in zero_optimization'
            )
        return saved

    def _zero3_consolidated_16bit_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        # Without a word, a rank would wait here for ranks that do not save.
        with consensus.announced(GATHERING):
            return super()._zero3_consolidated_16bit_state_dict(*args, **kwargs)
