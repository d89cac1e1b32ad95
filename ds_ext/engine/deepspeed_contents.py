"""What DeepSpeed's engine saves of a run by itself, in the file of the model, and what loads it.

| part                                  | keys                                   | loaded by      |
|---------------------------------------|----------------------------------------|----------------|
| buffers; whole weights, or frozen     | module, frozen_param_fragments         | `load_buffers` |
| steps, samples, schedules, data order | `_COUNTS`, lr_scheduler, data_sampler  | `load_counts`  |
| what ``client_state`` was given       | any other                              | `client_state` |
"""

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_ext.checkpoint.names import by_plain_name, plain
from ds_ext.checkpoint.pieces import Saved

_COUNTS = ("global_steps", "global_samples", "skipped_steps")
_KEYS = {
    *_COUNTS,
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd"),
    *("dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "ds_autoep_layers"),
    "sparse_tensor_module_names",  # of DeepSpeed before 0.19.8
}


def load_buffers(module: nn.Module, model: Saved) -> None:
    """Puts back what the module's state dict has beside parameters.

    Args:
        module: the engine's.
        model: what DeepSpeed saved in the file of the model.
    """
    params = {plain(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    own_names = {plain(name): name for name in module.state_dict()}
    saved = by_plain_name(model["module"]).items()
    buffers = {own_names.get(k, k): v for k, v in saved if k not in params}
    module.load_state_dict(buffers, strict=False)


def load_counts(
    engine: DeepSpeedEngine, model: Saved, passes: tuple[int, int], with_scheduler: bool
) -> None:
    """Puts back steps, schedules and the order of samples.

    Args:
        engine: whose counts are set.
        model: what DeepSpeed saved in the file of the model.
        passes: how many of a step's micro-batches were done, and how many it had.
        with_scheduler: whether the learning-rate scheduler is to go on from there.
    """
    if with_scheduler and engine.lr_scheduler is not None and model.get("lr_scheduler"):
        engine.lr_scheduler.load_state_dict(model["lr_scheduler"])
    if engine.random_ltd_enabled() and model.get("random_ltd"):
        engine.random_ltd_scheduler.load_state_dict(model["random_ltd"])
    if model.get("data_sampler") and engine.training_dataloader is not None:
        engine.training_dataloader.data_sampler.load_state_dict(model["data_sampler"])
    for name in _COUNTS:
        setattr(engine, name, model[name])
    (done, of), steps = passes, engine.gradient_accumulation_steps()
    engine.micro_steps = engine.global_steps * steps + done * steps // of


def client_state(model: Saved) -> dict[str, Any]:
    """Returns what ``engine.save_checkpoint(..., client_state=...)`` was given."""
    return {key: value for key, value in model.items() if key not in _KEYS}
