"""The rows of a plan: the memory of each optimizer at each stage, for any micro-batch."""

import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ds_ext.backward.streams import IN_FLIGHT
from ds_ext.config import config_checks
from ds_ext.optimizer import RuleOptimizer
from ds_ext.planner import activations, lora, memory, models
from ds_ext.planner.activations import GradientLifetime, MicroBatch
from ds_ext.planner.memory import MemoryUse
from ds_ext.planner.options import ALL, DEEPSPEEDS, DTYPES, PlanOptions, check_storage

GIB = 2**30
POLICIES = ("sharded", "projected")  # that keep gradients


@dataclass(frozen=True)
class Row:
    """The memory of an optimizer on a rank."""

    label: str
    without_activations: MemoryUse
    gradients: GradientLifetime = GradientLifetime(0)  # how long gradients live in backward
    kept: float = 0.0  # bytes of other gradients, which live throughout backward
    staged_bytes: float = 0.0  # that come from the host with a bucket
    host_bytes: float = 0.0  # offloaded, in the memory of the host
    lora: int = 0  # the rank of adapters, if only adapters are trained
    optimizer: type[RuleOptimizer] | None = None  # None if it is not an optimizer of ds_ext

    @property
    def constant(self) -> float:
        """Bytes throughout backward: without activations, and gradients of short lives."""
        use = self.without_activations
        return use.total - use.gradients - self.staged_bytes + self.kept


def name_of(optimizer: type[RuleOptimizer]) -> str:
    """Returns an optimizer's name, with the prefix that a config needs if DeepSpeed has it too."""
    name = optimizer.__name__
    return f"ds_ext.{name}" if name.lower() in DEEPSPEEDS else name


class MemoryPlan:
    """The plan of one model.

    Args:
        options: the options.
        name: the value of ``--model``.
    """

    def __init__(self, options: PlanOptions, name: str) -> None:
        self.options, self.name = options, name
        self.dtype = DTYPES[options.dtype]
        self.config = models.config(name)
        self.model: nn.Module = models.skeleton(self.config)
        self.shapes = memory.shapes_of(self.model)
        self.n = memory.elements(self.shapes)
        self._peaks: dict[tuple[MicroBatch, GradientLifetime, int], int] = {}

    @functools.cached_property
    def rows(self) -> list[Row]:
        """Rows of ds_ext optimizers, LoRA if requested, and DeepSpeed's AdamW."""
        found = [row for optimizer in self.options.optimizers for row in self._ours(optimizer)]
        return [*found, *self._fused(), *self._lora(), *self._adamw()]

    def changed(self, options: PlanOptions) -> "MemoryPlan":
        """Returns the plan of the same model and dtype with other options. Reuses activations."""
        other = copy.copy(self)
        other.__dict__.pop("rows", None)
        other.options = options
        return other

    def total(self, row: Row, batch: MicroBatch | None) -> MemoryUse:
        """Returns the memory of a row, with activations if a micro-batch is given."""
        if batch is None:
            return row.without_activations
        more = self._peak(row, batch) + row.constant - row.without_activations.total
        return replace(row.without_activations, activations=max(0.0, more))

    def _peak(self, row: Row, batch: MicroBatch) -> int:
        """Bytes of activations and gradients in backward. Cached, because many rows share them."""
        key = (batch, row.gradients, row.lora)
        if key not in self._peaks:
            self._peaks[key] = activations.peak(
                self.config,
                self.dtype,
                batch,
                row.gradients,
                functools.partial(lora.adapt, rank=row.lora) if row.lora else None,
            )
        return self._peaks[key]

    def largest_batch(self, row: Row, batch: MicroBatch, card: float) -> int:
        """Returns how many batch rows fit ``card`` GiB, by a line through the peaks of two.

        The two have one and two rows in each piece.
        """
        if row.without_activations.total > card * GIB:  # the step does not fit
            return 0
        available = card * GIB - row.constant
        each = batch.splits
        one, two = (self._peak(row, replace(batch, rows=rows)) for rows in (each, 2 * each))
        most = each + int((available - one) // ((two - one) / each))
        if most >= each or each == 1:
            return max(0, most)
        return self.largest_batch(row, replace(batch, splits=1), card)

    def _ours(self, optimizer: type[RuleOptimizer]) -> Iterator[Row]:
        options = self.options
        check_storage(options)
        try:
            rules = memory.rules_of(optimizer, self.model, options.params)
        except ValueError as error:
            raise ValueError(f"{options.spelled('params')}: {error}") from None
        if options.accumulates == "projected" and options.optimizer != ALL:
            whole, least = (memory.kept_gradients(rules, self.shapes, 1, x) for x in POLICIES)
            if whole == least:
                name = optimizer.__name__
                raise ValueError(
                    f"{options.spelled('accumulate')} projected: no gradient of {name} is "
                    "projected, as those of GaLoreAdamW with a rank are. Use sharded."
                )
        offloads = self._offloads(rules)
        for stage in options.stages:
            name = name_of(optimizer)
            label = f"{name}, {'plain step()' if stage is None else f'ZeRO-{stage}'}"
            if offloads:
                label += f", {' and '.join(offloads)} offloaded"
            ranks = options.shard_size if stage and options.shard_size else options.ranks
            of = (rules, self.shapes, stage, ranks, self.dtype, options.bucket)
            in_int8 = options.weight_storage == "int8"
            held, away, home = (
                memory.optimizer_memory(*of, options.accumulates, offloads, in_int8, staged_share)
                for staged_share in (None, 0.0, 1.0)
            )
            # Kept gradients are stepped after backward.
            each = 0.0 if options.accumulates else (home.total - away.total) / self.n
            noted = memory.cached_norms(rules, self.shapes, stage, ranks, self.dtype)
            held = replace(held, state=held.state + noted)
            kept = held.gradients - memory.optimizer_memory(*of).gradients
            behind = IN_FLIGHT if stage == 3 else 0
            bucket = None if stage is None else options.bucket
            waiting = GradientLifetime(bucket, behind, each, together=stage == 3)
            staged_bytes = held.total - noted - away.total
            on_host = home.total - away.total if offloads else 0.0
            row = Row(label, held, waiting, kept, staged_bytes, on_host, optimizer=optimizer)
            yield row
            if stage == 0 and options.ranks == 1 and not options.stage and not offloads:
                yield replace(row, label=f"{name}, fuse_into_backward")

    def _fused(self) -> Iterator[Row]:
        """In a plan of all optimizers on one rank: AdaLomo by ``fuse_into_backward``."""
        options = self.options
        is_plain = not (options.stage or options.offload_optimizer or options.weight_storage)
        if options.optimizer == ALL and options.ranks == 1 and is_plain:
            alone = self.changed(replace(options, optimizer="AdaLomo", stage="0"))
            yield replace(alone.rows[0], label="AdaLomo, fuse_into_backward")

    def _offloads(self, rules: Mapping[str, Any]) -> list[str]:
        """The offloaded parts. Raises ValueError if the engine would refuse the setting."""
        options = self.options
        kinds = dict.fromkeys(rules.values())
        has_state = any(config_checks.has_state(rule, self.dtype) for rule in kinds)
        if options.offload_optimizer and not has_state and options.optimizer != ALL:
            name = type(next(iter(kinds))).__name__
            raise ValueError(
                f"{options.spelled('offload_optimizer')}: {name} has next to no state."
            )
        wanted = {
            "param": options.offload_param,
            "optimizer": options.offload_optimizer and has_state,
        }
        return [name for name, is_on in wanted.items() if is_on]

    def _lora(self) -> Iterator[Row]:
        rank, stage = self.options.lora, max(s or 0 for s in self.options.stages)
        if rank is not None:
            skeleton = models.skeleton(self.config)
            of = (stage, self.options.ranks, self.dtype, self.options.bucket)
            label = f"LoRA of rank {rank}, DeepSpeed's AdamW, ZeRO-{stage}"
            yield Row(label, lora.lora(skeleton, rank, *of), lora=rank)

    def _adamw(self) -> Iterator[Row]:
        """Rows of DeepSpeed's AdamW, which partitions gradients from stage 2 on."""
        options, size = self.options, self.dtype.itemsize
        for stage in sorted({stage or 0 for stage in options.stages}):
            held = memory.adamw(self.shapes, stage, options.ranks, self.dtype, options.bucket)
            label = f"AdamW, DeepSpeed ZeRO-{stage}"
            if stage < 2:
                yield Row(label, held, GradientLifetime(None))
            else:
                runs = size * (self.n / options.ranks + options.bucket)
                yield Row(label, held, GradientLifetime(options.bucket), runs)
