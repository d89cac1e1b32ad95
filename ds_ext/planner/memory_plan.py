"""The rows of a plan: the memory of each optimizer at each stage, for any micro-batch."""

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from ds_ext.backward.streams import IN_FLIGHT
from ds_ext.config import optimizer_names
from ds_ext.optimizer import RuleOptimizer
from ds_ext.planner import activations, memory, models
from ds_ext.planner.activations import GradientLifetime, MicroBatch
from ds_ext.planner.memory import MemoryUse
from ds_ext.planner.options import DTYPES, PlanOptions

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """The memory of an optimizer on a rank."""

    label: str
    use: MemoryUse  # without activations
    gradients: GradientLifetime = GradientLifetime(0)  # how long gradients live in backward

    @property
    def constant(self) -> float:
        """Bytes throughout backward: without activations, and gradients of short lives."""
        return self.use.total - self.use.gradients + self.use.kept - self.use.staged


class MemoryPlan:
    """The plan of one model."""

    def __init__(self, options: PlanOptions) -> None:
        self.options = options
        self.dtype = DTYPES[options.dtype]
        self.config = models.config(options.model)
        self.model: nn.Module = models.skeleton(self.config)
        self.shapes = memory.shapes_of(self.model)
        self.n = memory.elements(self.shapes)
        self._peaks: dict[tuple[MicroBatch, GradientLifetime], int] = {}

    @functools.cached_property
    def rows(self) -> list[Row]:
        """Rows of ds_ext optimizers, and of DeepSpeed's AdamW."""
        found = [row for optimizer in self.options.optimizers for row in self._ours(optimizer)]
        return [*found, *self._adamw()]

    def changed(self, options: PlanOptions) -> "MemoryPlan":
        """Returns the plan of the same model and dtype with other options. Reuses activations."""
        other = copy.copy(self)
        other.__dict__.pop("rows", None)
        other.options = options
        return other

    def total(self, row: Row, batch: MicroBatch | None) -> MemoryUse:
        """Returns the memory of a row, with activations if a micro-batch is given."""
        if batch is None:
            return row.use
        more = self._peak(row, batch) + row.constant - row.use.total
        return replace(row.use, activations=max(0.0, more))

    def _peak(self, row: Row, batch: MicroBatch) -> int:
        """Bytes of activations and gradients in backward. Cached, because many rows share them."""
        key = (batch, row.gradients)
        if key not in self._peaks:
            self._peaks[key] = activations.peak(self.config, self.dtype, *key)
        return self._peaks[key]

    def largest_batch(self, row: Row, batch: MicroBatch, card: float) -> int:
        """Returns how many batch rows fit ``card`` GiB, by a line through the peaks of two.

        The two have one and two rows in each piece.
        """
        if row.use.total > card * GIB:  # the step does not fit
            return 0
        available = card * GIB - row.constant
        each = batch.splits
        one, two = (self._peak(row, replace(batch, rows=rows)) for rows in (each, 2 * each))
        most = each + int((available - one) // ((two - one) / each))
        if most >= each or each == 1:
            return max(0, most)
        return self.largest_batch(row, replace(batch, splits=1), card)

    def _ours(self, optimizer: type[RuleOptimizer]) -> Iterator[Row]:
        """The rows of a ds_ext optimizer, one for each stage."""
        options = self.options
        rules = memory.rules_of(optimizer, self.model, options.params)
        name = optimizer_names.in_config(optimizer.__name__)
        offloads = [what for what in ("param", "optimizer") if options.offloads(what)]
        for stage in options.stages:
            label = f"{name}, {'plain step()' if stage is None else f'ZeRO-{stage}'}"
            if offloads:
                label += f", {' and '.join(offloads)} offloaded"
            of = (rules, self.shapes, stage, options.ranks, self.dtype)
            in_int8 = options.own.weight_storage == "int8"
            how = (options.bucket, options.accumulates, offloads, in_int8)
            use = memory.optimizer_memory(*of, *how)
            waiting = GradientLifetime(
                None if stage is None else options.bucket,
                IN_FLIGHT if stage == 3 else 0,
                # Kept gradients are stepped after backward.
                0.0 if options.accumulates else use.host / self.n,
                together=stage == 3,
            )
            yield Row(label, use, waiting)

    def _adamw(self) -> Iterator[Row]:
        """Rows of DeepSpeed's AdamW, which partitions gradients from stage 2 on."""
        options = self.options
        for stage in sorted({stage or 0 for stage in options.stages}):
            use = memory.adamw(self.shapes, stage, options.ranks, self.dtype, options.bucket)
            waiting = GradientLifetime(options.bucket if stage >= 2 else None)
            yield Row(f"AdamW, DeepSpeed ZeRO-{stage}", use, waiting)
