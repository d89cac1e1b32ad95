"""What a checkpoint of an engine holds: each part has a function to save and one to load it.

| part                                   | saved by             | loaded by                   |
|----------------------------------------|----------------------|-----------------------------|
| weights; the optimizer's state, groups | ``resharding.save_`` | ``resharding.load_``        |
| gradients between micro-batches        | ``save_gradients``   | ``load_gradients``          |
| loss scaler, norm, skipped steps       | ``save_scaler``      | ``load_scaler``             |
| buffers; counts, schedules; the user's | DeepSpeed            | ``deepspeed_contents.load_``|

``save`` returns the first three, with what DeepSpeed's script zero_to_fp32.py reads of them.
"""

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from torch import Tensor, nn

from ds_ext.backward.gradients import FusedBackward
from ds_ext.checkpoint import checks, resharding
from ds_ext.checkpoint.names import plain
from ds_ext.checkpoint.pieces import Pieces, Saved, piece
from ds_ext.checkpoint.resharding import Own
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import size_of
from ds_ext.engine import expert_parallel, settings
from ds_ext.engine.log import log
from ds_ext.engine.zero3 import Partitions
from ds_ext.errors import CheckpointError
from ds_ext.optimizer.model_view import summary


def owned(layout: Layout) -> dict[Tensor, Own]:
    """Returns what this rank has of every parameter of the model."""
    return {
        p: Own(
            plain(name),
            layout.run(p),
            layout.shard(p),
            layout.of[p].shard_index,
            layout.of[p].num_shards,
            expert_parallel.place(p),
        )
        for p, name in layout.names.items()
    }


def stepped(fused: FusedBackward) -> list[Tensor]:
    """Returns the optimizer's parameters, in order, but for those without elements."""
    return [p for p in fused.optimizer.number_of if fused.layout.shard(p).numel]


class Contents:
    """This rank's part of the checkpoints of an engine.

    Args:
        engine: whose micro-batches are counted.
        fused: its gradients, layout and optimizer.
        scaler: its loss scaler.
    """

    def __init__(
        self, engine: DeepSpeedEngine, fused: FusedBackward, scaler: LossScalerBase
    ) -> None:
        self.engine = engine
        self.fused = fused
        self.scaler = scaler
        self.layout = fused.layout
        self.optimizer = fused.optimizer
        self.owned = owned(fused.layout)
        self.names = [plain(weight.name) for weight in fused.layout.weights]  # on all ranks

    def save(self) -> dict[str, Any]:
        """Returns what ``load`` reads of all ranks; frozen weights are in DeepSpeed's file."""
        saved = resharding.save(self.optimizer, self._to_be_saved())
        return {
            **saved,
            **self._for_zero_to_fp32(saved["weights"]),
            **self.save_scaler(),
            "accumulated": self.save_gradients(),
        }

    def check(self, pieces: Pieces, strict: bool) -> None:
        """Checks that ``load`` can be called, with nothing changed.

        Args:
            pieces: what ``save`` returned on all ranks.
            strict: whether the model and the checkpoint must have the same parameters.

        Raises:
            CheckpointError: naming what does not fit the model, its optimizer or the engine.
        """
        checks.check(pieces, self.optimizer, self.owned, strict, self.names)
        self.check_gradients(pieces)

    def load(self, pieces: Pieces) -> None:
        """Puts back what ``save`` returned; other ranks do not have the weights yet."""
        resharding.load_state(pieces, self.optimizer, self.owned)
        self.load_scaler(pieces.saved[0])
        self.load_gradients(pieces)
        self.load_weights(pieces)

    def load_without_state(self, pieces: Pieces) -> None:
        """Puts back the weights alone; the optimizer's state starts anew."""
        self.optimizer.state.clear()
        self.fused.begin_with({})
        self.load_weights(pieces)

    def load_weights(self, pieces: Pieces) -> None:
        """Puts back the weights, and tells of those that were not saved."""
        missing = resharding.load_weights(pieces, self.optimizer, self.owned)
        if missing:
            names = summary(missing)
            log(f"not in the checkpoint, left as they were: {names}")

    def _to_be_saved(self) -> dict[Tensor, Own]:
        """What this rank has of trained weights, and of frozen ones where ranks have different."""
        if self.engine.autotp_size() > 1 or self.engine.has_moe_layers:
            return self.owned
        trained, elsewhere = self.optimizer.group_of, self.layout.saved_elsewhere
        return {
            p: own
            for p, own in self.owned.items()
            if (p in trained or p.requires_grad) and p not in elsewhere
        }

    # Gradients that wait for the rest of their step's micro-batches: sums over ranks, each of which
    # has a mean loss, times the loss scale.

    def save_gradients(self) -> dict[str, Any]:
        """Returns pieces of kept gradients, and what they are sums of."""
        gradients = {}
        for param, run in self.fused.tally.kept.items():
            own = self.owned[param]
            values = run.g[: len(own.shard)]
            gradients[own.name] = piece(values, own.part)
        engine, steps = self.engine, self.engine.gradient_accumulation_steps()
        done = engine.micro_steps % steps if settings.counts_micro_batches(engine) else 0
        return {
            "passes": [done, steps],
            "losses": self._grad_divisor,
            "loss_scale": self.scaler.loss_scale,
            "gradients": gradients,
        }

    def check_gradients(self, pieces: Pieces) -> None:
        """Checks that a step can be resumed from gradients that were saved in the midst of it.

        Raises:
            CheckpointError: if so many micro-batches cannot be done here, or if some are missing.
        """
        done, of = pieces.saved[0]["accumulated"]["passes"]
        steps = self.engine.gradient_accumulation_steps()
        if done * steps % of:
            raise CheckpointError(
                f"this checkpoint was saved after {done} of {of} micro-batches of a step, which is "
                f"no whole number out of {steps}: make gradient_accumulation_steps a multiple "
                f"of {of}."
            )
        for own in self.owned.values():
            keys = ("accumulated", "gradients", own.name)
            if pieces.first(*keys) is not None and pieces.lacks(own.part, *keys):
                raise CheckpointError(f"this checkpoint lacks some of {own.name}'s gradient.")

    def load_gradients(self, pieces: Pieces) -> None:
        """Begins a step with the saved gradients, as if these ranks had summed them."""
        saved = pieces.saved[0]["accumulated"]
        factor = self.scaler.loss_scale / saved["loss_scale"]
        if self.fused.how.average:
            factor *= self._grad_divisor / saved["losses"]
        kept = {}
        for param, own in self.owned.items():
            keys = ("accumulated", "gradients", own.name)
            found = pieces.first(*keys)
            if found is not None:
                values = pieces.read(own.part, *keys)
                kept[param] = values.to(param.device) * factor
        self.fused.begin_with(kept)

    @property
    def _grad_divisor(self) -> int:
        """How many mean losses a gradient is summed over, but for tensor parallelism."""
        return self.layout.world // int(self.engine.sequence_parallel_size)

    # The loss scaler, and what clipping by the norm before and users know of steps.

    def save_scaler(self) -> dict[str, Any]:
        """Returns the numbers that the next step begins with, the same on every rank."""
        return {
            "loss_scaler": {k: v for k, v in vars(self.scaler).items() if k != "dtype"},
            "previous_norm": self.fused.previous_norm,
            "skipped_steps": self.fused.skipped_steps,
        }

    def load_scaler(self, saved: Saved) -> None:
        """Puts back what ``save_scaler`` returned; another kind of scaler stays as it is."""
        if saved["loss_scaler"].keys() <= vars(self.scaler).keys():
            vars(self.scaler).update(saved["loss_scaler"])
        else:
            log("the loss scale is not that of the checkpoint, which had another kind of it")
        self.fused.previous_norm = saved["previous_norm"]
        self.fused.skipped_steps = saved["skipped_steps"]

    # What DeepSpeed's script zero_to_fp32.py reads: the same weights once more, without names.

    def _for_zero_to_fp32(self, weights: dict[str, Any]) -> dict[str, Any]:
        """The runs of stepped parameters, which share memory with ``weights``: saved once."""
        if self.layout.is_part:
            return {}  # it knows no pipelines, whose layers DeepSpeed saves whole
        is_padded = isinstance(self.layout, Partitions)
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
            "partition_count": 1 if stage == 0 else size_of(self.layout.copy_group),
            "fp32_flat_groups" if is_padded else "single_partition_of_fp32_groups": runs,
        }
