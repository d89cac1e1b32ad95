"""Checks an engine: its ranks, model and config before ds_ext drives it, and its scheduler.

``ds_ext.config.config_checks`` checks the keys of the config.
"""

import inspect
from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch._dynamo import OptimizedModule
from torch.optim import Optimizer

from ds_ext.config.config_checks import problems, size_problems
from ds_ext.config.parsing import lookup, normalized
from ds_ext.distributed import consensus
from ds_ext.distributed.unsupported_wrappers import refuse_dtensors, refuse_wrapped
from ds_ext.engine import expert_parallel, hook_cleanup, parameters, pipeline, trainer_checks
from ds_ext.engine.deepspeed_config import left_auto, refuse_without_rate, replaced_rates
from ds_ext.engine.engine_settings import effective
from ds_ext.engine.rank_logging import warn
from ds_ext.errors import raise_all
from ds_ext.optimizer import RuleOptimizer, param_checks

# Keys that may differ between ranks, because they only control logging.
_LOCAL = {
    *("tensorboard", "wandb", "csv_monitor", "comet", "steps_per_print", "dump_state"),
    *("wall_clock_breakdown", "memory_breakdown", "flops_profiler", "comms_logger"),
}


def _sequence_ranks(mpu: Any) -> int:
    """How many ranks share a sequence according to an ``mpu``, which may be None."""
    return int(getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)())


def check_sequences(config: DeepSpeedConfig, mpu: Any) -> None:
    """Raises ValueError unless the ranks that share a sequence (Ulysses) come from an ``mpu``.

    If only the config sets them, DeepSpeed ignores them, or does not sum gradients over them.
    """
    if mpu is None and (left := _sequence_ranks(groups.mpu)) > 1:
        raise ValueError(
            "DeepSpeed keeps the mpu of an earlier engine of this process, whose sequences have "
            f"{left} ranks, for this engine too: pass it to deepspeed.initialize as mpu, or set "
            "deepspeed.utils.groups.mpu = None before."
        )
    values, size = normalized(config._param_dict), _sequence_ranks(mpu)
    asked = values.get("sequence_parallel_size", 1)
    if asked not in (1, size):
        raise ValueError(
            f"sequence_parallel_size = {asked}, but the sequences of mpu have {size} "
            f"rank{'s'[: size > 1]}: call initialize_sequence_parallel({asked}) of "
            "deepspeed.runtime.sequence_parallel.parallel_state_sp, and pass that module to "
            "deepspeed.initialize as mpu."
        )
    if size > 1:
        found = problems(values | {"sequence_parallel_size": size})
        raise_all(f"{line} The mpu sets sequence_parallel_size." for line in found)


def check_ranks(model: Any, client: Any, config: DeepSpeedConfig) -> None:
    """Raises ValueError, on all ranks, if not all start the same run. All ranks must call it.

    A rank whose optimizer is not of ds_ext does not call it: the others wait for the time limit.
    Pipeline ranks compare parameters and param groups only with the ranks of their stage.
    ``client`` is the optimizer that the program passes; None if the config names it.
    """
    given = client if isinstance(client, Optimizer) else None
    facts = {  # their ``repr`` is the same in every process
        "optimizer": type(client).__name__ if client is not None else config.optimizer_name,
        "config": {k: v for k, v in config._param_dict.items() if k not in _LOCAL},
        **consensus.facts(model, given, parameters.whole_shape),
    }
    if not isinstance(model, PipelineModule):
        consensus.require_equal(facts)
        return
    own = ("parameter", "parameter group")
    of_stage: dict[str, Any] = {key: facts.pop(key) for key in own if key in facts}
    consensus.require_equal(facts)
    group = model.mpu().get_data_parallel_group()
    consensus.run_on_all_ranks(lambda: consensus.require_equal(of_stage, group), ValueError)


def validate(engine: DeepSpeedEngine, optimizer: RuleOptimizer) -> None:
    """Raises ValueError for an engine that ds_ext cannot train, before it wraps the optimizer."""
    hook_cleanup.refuse_partitions(engine)
    world = dist.get_world_size(engine.seq_data_parallel_group)
    trainer_checks.refuse_same_data(world // int(engine.sequence_parallel_size))
    if pipeline.is_pipeline(engine):
        pipeline.check_supported(engine)
    else:  # a stage may have no trained parameter
        param_checks.refuse_all_frozen(optimizer)
    refuse_wrapped(engine.module)
    refuse_dtensors(engine.module)
    param_checks.refuse_shared_memory(engine.module.parameters())
    config, given = effective(engine), engine._config._param_dict
    is_named = engine.client_lr_scheduler is None
    params = (lookup(given, "scheduler.params") if is_named else None) or {}
    # The config of zero.Init may have these: a client fills them in later.
    keys = ["bf16.enabled", "fp16.enabled", "gradient_clipping", "steps_per_print"]
    keys += [f"scheduler.params.{key}" for key in params]
    found = [*problems(config, pipeline.gradients_kept_for(engine)), *left_auto(given, keys)]
    raise_all([*found, *size_problems(config, dist.get_world_size())])
    if is_named:
        for line in replaced_rates(given, [group["lr"] for group in optimizer.param_groups]):
            warn(line)
    compiled = any(isinstance(m, OptimizedModule) for m in engine.module.modules())
    if compiled and engine.zero_optimization_stage() == 3:
        raise ValueError(
            "zero_optimization.stage = 3 cannot partition what torch.compile has wrapped: give "
            "deepspeed.initialize the model itself, and call engine.compile() after it."
        )
    if engine.has_moe_layers:
        _refuse_experts(engine)
    has_scheduler = engine.client_lr_scheduler is not None or engine.scheduler_name() is not None
    if has_scheduler:
        refuse_without_rate(optimizer)


def _refuse_experts(engine: DeepSpeedEngine) -> None:
    """Raises an error if experts are spread over ranks in an unsupported way."""
    if engine.zero_optimization_stage() == 3:
        engine._validate_zero3_moe_compatibility()
    # deepspeed.moe treats the mpu parallel_state_sp as tensor-parallel too.
    if engine.autotp_size() <= 1 and bwc_tensor_model_parallel_world_size(engine.mpu) > 1:
        raise ValueError(
            "DeepSpeed's experts would treat the ranks of this mpu as tensor-parallel ranks and "
            "drop tokens: leave out mpu. For tensor parallelism, write tensor_parallel.autotp_size "
            "into the config."
        )
    if engine.sequence_parallel_size > 1:
        raise ValueError(
            "DeepSpeed's experts are not supported together with sequence parallelism: remove "
            "sequence_parallel_size and mpu."
        )
    native = (module for module in engine.module.modules() if isinstance(module, MoE))
    experts = [p for layer in native for p in layer.deepspeed_moe.experts.parameters()]
    if any(not expert_parallel.is_expert(p) or parameters.is_divided(p) for p in experts):
        raise ValueError(
            "tensor_parallel.partition_config: its patterns match experts of deepspeed.moe layers. "
            "They cannot be split, because ranks send them different tokens: remove the patterns."
        )


def check_metrics(scheduler: Any, kwargs: dict[str, Any]) -> None:
    """Raises ValueError if a scheduler needs a metric that its step's ``kwargs`` do not have."""
    if "metrics" in inspect.signature(scheduler.step).parameters and "metrics" not in kwargs:
        raise ValueError(
            f"{type(scheduler).__name__} needs a metric, but DeepSpeed would give it the batch "
            'size: call engine.step(lr_kwargs={"metrics": ...}), or step it yourself and keep it '
            "from DeepSpeed. In HF Trainer, choose another lr_scheduler_type."
        )
