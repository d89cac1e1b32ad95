"""The contents of an engine's checkpoint, with functions that save and load each part.

| part                                   | saved by             | loaded by                   |
|----------------------------------------|----------------------|-----------------------------|
| weights; the optimizer's state, groups | ``resharding.save_`` | ``resharding.load_``        |
| loss scaler, norm, skipped steps       | ``Contents.save``    | ``Contents.load``           |
| buffers                                | DeepSpeed            | ``load_buffers``            |
| steps, samples, schedules, data order  | DeepSpeed            | ``load_counts``             |
| the user's ``client_state``            | DeepSpeed            | ``client_state``            |

``save`` returns the first two parts, and the entries that DeepSpeed's zero_to_fp32.py reads.
Gradients of an unfinished step are not saved: after loading, its micro-batches begin again.
"""

from collections.abc import Collection, Mapping
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from torch import Tensor, nn

from ds_ext.backward.fused_backward import FusedBackward
from ds_ext.checkpoint import resharding
from ds_ext.checkpoint.pieces import Pieces, Saved, by_plain_name, plain_name
from ds_ext.checkpoint.resharding import OwnedRun
from ds_ext.distributed.groups import size_of
from ds_ext.distributed.layout import Layout
from ds_ext.engine import expert_parallel
from ds_ext.engine.rank_logging import log, warn
from ds_ext.engine.zero3 import Zero3Layout
from ds_ext.ops import int8
from ds_ext.optimizer.model_view import summary


def owned(layout: Layout) -> dict[Tensor, OwnedRun]:
    """Returns this rank's run of every parameter of the model."""
    return {
        p: OwnedRun(
            plain_name(name),
            held.absent if (held := int8.find(p)) else layout.run(p),
            layout.shards[p],
            layout.placement_of[p].shard_index,
            layout.placement_of[p].num_shards,
            expert_parallel.stack_position(p),
        )
        for p, name in layout.names.items()
    }


def stepped(fused: FusedBackward) -> list[Tensor]:
    """Returns the optimizer's nonempty parameters in order."""
    return [p for p in fused.optimizer.number_of if fused.layout.shards[p].numel]


class Contents:
    """Saves and loads this rank's part of an engine's checkpoints."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.fused: FusedBackward = engine.optimizer.fused
        self.scaler: LossScalerBase = engine.optimizer.loss_scaler
        self.layout: Layout = self.fused.layout
        self.optimizer = self.fused.optimizer
        self.owned = owned(self.layout)

    def save(self) -> dict[str, Any]:
        """Returns the state that ``load`` reads. Frozen weights are in DeepSpeed's file."""
        saved = resharding.save(self.optimizer, self._to_be_saved())
        return {
            **saved,
            **self._for_zero_to_fp32(saved["weights"]),
            # What the next step needs, equal on every rank.
            "loss_scaler": {k: v for k, v in vars(self.scaler).items() if k != "dtype"},
            "previous_norm": self.fused.clipping.previous_norm,
            "skipped_steps": self.fused.skipped_steps,
        }

    def load(self, pieces: Pieces, with_state: bool) -> None:
        """Loads the results of ``save``. The caller must publish the weights to other ranks.

        Logs the names of weights that the checkpoint lacks.

        Args:
            pieces: the results of ``save`` on all ranks.
            with_state: whether to load more than weights; otherwise resets the optimizer's state.
        """
        if self.fused.is_begun:
            warn(
                "load_checkpoint drops the gradients of an unfinished step, which were computed "
                "with the weights that it replaces: call it after the step to use them"
            )
        self.fused.drop_step()
        if with_state:
            scheduler = self.engine.lr_scheduler
            scheduled = set() if scheduler is None else {"lr"}
            if getattr(scheduler, "cycle_momentum", False):
                scheduled |= {"betas", "momentum"}
            if changed := resharding.changed_hypers(pieces, self.optimizer, scheduled):
                warn(
                    f"load_checkpoint sets the saved hyper-parameters: {', '.join(changed)}. To "
                    "change them, edit engine.optimizer.param_groups after loading"
                )
            resharding.load_state(pieces, self.optimizer, self.owned)
            saved = pieces.saved[0]
            if saved.get("accumulated", {}).get("passes", [0])[0]:  # of ds_ext before 1.1
                warn(
                    "this checkpoint was saved between the micro-batches of a step. Their "
                    "gradients are not loaded: the step begins again"
                )
            if saved["loss_scaler"].keys() <= vars(self.scaler).keys():
                vars(self.scaler).update(saved["loss_scaler"])
            else:
                log("the loss scale is not loaded: the checkpoint has another type of loss scaler")
            self.fused.clipping.previous_norm = saved["previous_norm"]
            self.fused.skipped_steps = saved["skipped_steps"]
        else:
            self.optimizer.state.clear()
            self.fused.clipping.previous_norm = None
        if missing := resharding.load_weights(pieces, self.optimizer, self.owned):
            log(f"not in the checkpoint, left as they were: {summary(missing)}")

    def _to_be_saved(self) -> dict[Tensor, OwnedRun]:
        """This rank's runs of trained weights, and of frozen weights that differ between ranks."""
        if self.engine.autotp_size() > 1 or self.engine.has_moe_layers:
            return self.owned
        trained, elsewhere = self.optimizer.group_of, self.layout.saved_elsewhere
        return {
            p: own
            for p, own in self.owned.items()
            if (p in trained or p.requires_grad) and p not in elsewhere
        }

    # DeepSpeed's zero_to_fp32.py reads the same weights, without names.

    def _for_zero_to_fp32(self, weights: dict[str, Any]) -> dict[str, Any]:
        """The runs of stepped parameters. They share memory with ``weights``: saved only once."""
        if self.layout.is_pipeline_stage:
            return {}  # the script does not support pipelines
        is_padded = isinstance(self.layout, Zero3Layout)
        runs = []
        for param in stepped(self.fused):
            own = self.owned[param]
            values = weights[own.name]["values"]
            n, size = len(values), own.shard.size
            run = nn.functional.pad(values, (0, size - n)) if is_padded else values
            weights[own.name]["values"] = run[:n]
            runs.append(run)
        stage = int(self.engine.zero_optimization_stage())
        return {
            "zero_stage": stage,
            "partition_count": 1 if stage == 0 else size_of(self.layout.group),
            "fp32_flat_groups" if is_padded else "single_partition_of_fp32_groups": runs,
        }


def state_in(file: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the result of ``Contents.save`` that a file contains, or None."""
    found = file.get("optimizer_state_dict") or file.get("optimizer")
    return found if isinstance(found, dict) and "ds_ext" in found else None


def names_in(file: Mapping[str, Any]) -> dict[str, Collection[str]]:
    """Returns the names in the result of ``Contents.save`` that a file contains, by section."""
    found = state_in(file)
    if found is None:
        return {}
    return {"weights": found["weights"], "state": found["state"]}


# Entries that DeepSpeed's engine saves in the model's file.

_COUNTS = ("global_steps", "global_samples", "skipped_steps")
_KEYS = {
    *_COUNTS,
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd"),
    *("dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "ds_autoep_layers"),
}


def load_buffers(module: nn.Module, model: Saved) -> None:
    """Loads the module's buffers and extra state from the contents of the model's file."""
    params = {plain_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    own_names = {plain_name(name): name for name in module.state_dict()}
    saved = by_plain_name(model["module"]).items()
    buffers = {own_names.get(k, k): v for k, v in saved if k not in params}
    module.load_state_dict(buffers, strict=False)


def load_counts(engine: DeepSpeedEngine, model: Saved, with_scheduler: bool) -> None:
    """Loads step counts, schedules and the order of samples from the model's file."""
    if with_scheduler and engine.lr_scheduler is not None and model.get("lr_scheduler"):
        engine.lr_scheduler.load_state_dict(model["lr_scheduler"])
    if engine.random_ltd_enabled() and model.get("random_ltd"):
        engine.random_ltd_scheduler.load_state_dict(model["random_ltd"])
    if model.get("data_sampler") and engine.training_dataloader is not None:
        engine.training_dataloader.data_sampler.load_state_dict(model["data_sampler"])
    for name in _COUNTS:
        setattr(engine, name, model[name])
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()


def client_state(model: Saved) -> dict[str, Any]:
    """Returns the ``client_state`` that was passed to ``engine.save_checkpoint``."""
    return {key: value for key, value in model.items() if key not in _KEYS}
