"""What an engine was asked to do and ds_ext cannot: ValueError, by the name of the setting."""

import inspect
from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch._dynamo import OptimizedModule

from ds_ext.config import gradients, offload, refused
from ds_ext.distributed import consensus
from ds_ext.distributed.wrapped import refuse_dtensors, refuse_wrapped
from ds_ext.engine import (
    autotp,
    callers,
    copies,
    expert_parallel,
    leftovers,
    names,
    pipeline,
    quantized,
    versions,
)
from ds_ext.engine.settings import effective
from ds_ext.optimizer import RuleOptimizer

# What may differ from rank to rank: it is about what is written and shown.
_LOCAL = {
    *("tensorboard", "wandb", "csv_monitor", "comet", "steps_per_print", "dump_state"),
    *("wall_clock_breakdown", "memory_breakdown", "flops_profiler", "comms_logger"),
}


def refuse(engine: DeepSpeedEngine, optimizer: RuleOptimizer) -> None:
    """Checks that ds_ext can do what this engine was asked to do.

    Args:
        engine: before it wraps its optimizer.
        optimizer: the one it is to have.

    Raises:
        ValueError: naming the setting, and what to do instead.
    """
    leftovers.refuse_gradient_hooks(engine)
    leftovers.refuse_partitions(engine)
    world = dist.get_world_size(engine.seq_data_parallel_group)
    callers.refuse_same_data(world // int(engine.sequence_parallel_size))
    if pipeline.is_pipeline(engine):
        pipeline.refuse(engine)
    refuse_wrapped(engine.module)
    refuse_dtensors(engine.module)
    config = effective(engine)
    versions.refuse_lacking(config)
    refused.refuse(config)
    gradients.read(config, keeps=pipeline.keeps(engine))
    firsts = {id(optimizer.group_of[p]): p for p in optimizer.group_of}.values()
    offload.check(config, map(optimizer.rule_of, firsts), {p.dtype for p in optimizer.group_of})
    is_divided = engine.mp_world_size > 1 or engine.has_moe_layers or pipeline.is_pipeline(engine)
    if copies.shard_size(config) and is_divided:
        raise ValueError(
            f"{copies.KEY} cannot be had together with model parallelism, pipelines or experts "
            "that ranks share out yet: remove it, or mpu, PipelineModule and deepspeed.moe layers."
        )
    quantized.refuse_without_quantizer(engine)
    compiled = any(isinstance(m, OptimizedModule) for m in engine.module.modules())
    if compiled and engine.zero_optimization_stage() == 3:
        raise ValueError(
            "zero_optimization.stage = 3 cannot partition what torch.compile has wrapped: give "
            "deepspeed.initialize the model itself, and call engine.compile() after it."
        )
    if engine.has_moe_layers:
        _refuse_experts(engine)
    if engine.client_lr_scheduler is not None or engine.scheduler_name() is not None:
        refuse_schedule(optimizer)


def refuse_schedule(optimizer: RuleOptimizer) -> None:
    """Checks that there is a learning rate for a scheduler to set.

    Raises:
        ValueError: if the optimizer computes its own.
    """
    if any(group["lr"] is None for group in optimizer.param_groups):
        raise ValueError(
            "Adafactor: optimizer.params.relative_step=true computes its own step size, so there "
            'is no lr for a scheduler to set. Set "relative_step": false and an "lr" (HF Trainer '
            "always has a scheduler), or remove the scheduler."
        )


def _refuse_experts(engine: DeepSpeedEngine) -> None:
    """Raises ValueError for experts spread in a way that is not supported."""
    native = [module for module in engine.module.modules() if isinstance(module, MoE)]
    stage, tensor_size = engine.zero_optimization_stage(), engine.autotp_size()
    sequences = engine.sequence_parallel_size > 1
    if native and stage == 3:
        raise ValueError(
            "zero_optimization.stage = 3: DeepSpeed does not partition deepspeed.moe layers. Use "
            'stage 0, 1 or 2, or "expert_parallel" (AutoEP) with the experts of the model itself.'
        )
    refuse_divided_sequences(stage, sequences, tensor_size)
    # To deepspeed.moe parallel_state_sp is an mpu of tensor parallelism too.
    if tensor_size <= 1 and bwc_tensor_model_parallel_world_size(engine.mpu) > 1:
        raise ValueError(
            "DeepSpeed's experts take the ranks of this mpu for those of tensor parallelism, and "
            "would drop tokens: leave out mpu, and write tensor_parallel.autotp_size or "
            "sequence_parallel_size into the config."
        )
    experts = [p for layer in native for p in layer.deepspeed_moe.experts.parameters()]
    if any(not expert_parallel.is_expert(p) or autotp.is_divided(p) for p in experts):
        raise ValueError(
            "tensor_parallel.partition_config: its patterns divide experts of deepspeed.moe "
            "layers, which DeepSpeed sends other tokens on each rank: leave them out."
        )


def refuse_divided_sequences(stage: Any, sequences: bool, tensor_size: Any) -> None:
    """Checks that experts can be spread as a config says, where sequences may be divided.

    Raises:
        ValueError: if not.
    """
    if sequences and stage == 3:
        raise ValueError(
            "zero_optimization.stage = 3: DeepSpeed does not partition the experts of AutoEP where "
            "sequences are divided: use stage 0, 1 or 2, or remove sequence_parallel_size."
        )
    if sequences and tensor_size > 1:
        raise ValueError(
            "DeepSpeed's experts go with tensor_parallel.autotp_size or sequence_parallel_size, "
            "not with both: remove one of them."
        )


def check_betas(scheduler: Any, optimizer: RuleOptimizer) -> None:
    """Checks that a scheduler has set as many betas as the optimizer has.

    Raises:
        ValueError: if it has not: DeepSpeed's OneCycle, with CAME.
    """
    for group in optimizer.param_groups:
        hypers = optimizer.hypers_of(group)
        needed = len(getattr(hypers, "betas", ()))
        if len(group.get("betas", ())) != needed:
            raise ValueError(
                f"{hypers.__name__} has {needed} betas; {type(scheduler).__name__} sets "
                f'{group["betas"]}: put "cycle_momentum": false into scheduler.params.'
            )


def check_metrics(scheduler: Any, given: dict[str, Any]) -> None:
    """Checks that a scheduler gets its metric, for which DeepSpeed would take the batch size.

    Args:
        scheduler: that is about to be stepped.
        given: its arguments, by name.

    Raises:
        ValueError: if it needs a metric and none is given.
    """
    if "metrics" in inspect.signature(scheduler.step).parameters and "metrics" not in given:
        raise ValueError(
            f"{type(scheduler).__name__} needs a metric, for which DeepSpeed would take the batch "
            'size: call engine.step(lr_kwargs={"metrics": ...}), or step it yourself and keep it '
            "from DeepSpeed. In HF Trainer, choose another lr_scheduler_type."
        )


def is_ours(engine: DeepSpeedEngine) -> bool:
    """Returns whether an engine is to have an optimizer of ours: an object, or by its config."""
    client = engine.client_optimizer
    if client is None:
        return names.ours(engine.optimizer_name()) is not None
    return isinstance(client, RuleOptimizer)


def agree_on_stages(engine: DeepSpeedEngine, model: PipelineModule) -> None:
    """Checks that all ranks of a pipeline were started alike, and those of a stage with its layers.

    Raises:
        ValueError: on all ranks, naming what differs.
    """
    told = facts(engine, model)
    own = ("parameter", "parameter group")
    layers: dict[str, Any] = {key: told.pop(key) for key in own if key in told}
    consensus.agree(told)
    group = model.mpu().get_data_parallel_group()
    consensus.together(lambda: consensus.agree(layers, group), ValueError)


def facts(engine: DeepSpeedEngine, model: Any) -> dict[str, Any]:
    """Returns what all ranks must have been started with alike, if one of them uses ds_ext.

    Values have a ``repr`` that is the same in every process, and can be pickled.
    """
    client = engine.client_optimizer
    name = type(client).__name__ if client is not None else engine.optimizer_name()
    if not is_ours(engine):
        return {"optimizer": name}
    config = {k: v for k, v in engine._config._param_dict.items() if k not in _LOCAL}
    told = consensus.facts(model, client, autotp.whole_shape)
    counted = callers.num_processes() or 0
    few = counted if 0 < counted < dist.get_world_size() else None  # see refuse_same_data
    return {"optimizer": name, "config": config, "accelerate process count": few, **told}
