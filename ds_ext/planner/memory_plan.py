"""The rows of a plan: the memory of each optimizer at each stage, for any micro-batch."""

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from ds_ext.config import optimizer_names
from ds_ext.optimizer import RuleOptimizer
from ds_ext.planner import activations, memory, models
from ds_ext.planner.activations import MicroBatch
from ds_ext.planner.memory import GradientLifetime, MemoryUse
from ds_ext.planner.options import DTYPES, PlanOptions

GIB = 2**30


class MemoryPlan:
    """The plans of one model in one dtype. They share the measured activations."""

    def __init__(self, options: PlanOptions) -> None:
        self.dtype = DTYPES[options.dtype]
        self.config = models.config(options.model)
        self.model: nn.Module = models.skeleton(self.config)
        self.shapes = memory.shapes_of(self.model)
        self.n = memory.elements(self.shapes)
        self._peaks: dict[tuple[MicroBatch, GradientLifetime], int] = {}

    def rows(self, options: PlanOptions) -> dict[str, MemoryUse]:
        """Rows of ds_ext optimizers, and of DeepSpeed's AdamW, by label; without activations."""
        ours = [row for optimizer in options.optimizers for row in self._ours(optimizer, options)]
        return dict([*ours, *self._adamw(options)])

    def total(self, use: MemoryUse, batch: MicroBatch | None) -> MemoryUse:
        """Returns the memory of a row, with activations if a micro-batch is given."""
        if batch is None:
            return use
        more = self._peak(use, batch) + use.constant - use.total
        return replace(use, activations=max(0.0, more))

    def _peak(self, use: MemoryUse, batch: MicroBatch) -> int:
        """Bytes of activations and gradients in backward. Cached, because many rows share them."""
        key = (batch, use.lifetime)
        if key not in self._peaks:
            self._peaks[key] = activations.peak(self.config, self.dtype, *key)
        return self._peaks[key]

    def largest_batch(self, use: MemoryUse, batch: MicroBatch, card: float) -> int:
        """Returns how many batch rows fit ``card`` GiB, by a line through the peaks of two.

        The two have one and two rows in each piece.
        """
        if use.total > card * GIB:  # the step does not fit
            return 0
        available = card * GIB - use.constant
        each = batch.splits
        one, two = (self._peak(use, replace(batch, rows=rows)) for rows in (each, 2 * each))
        most = each + int((available - one) // ((two - one) / each))
        if most >= each or each == 1:
            return max(0, most)
        return self.largest_batch(use, replace(batch, splits=1), card)

    def _ours(
        self, optimizer: type[RuleOptimizer], options: PlanOptions
    ) -> Iterator[tuple[str, MemoryUse]]:
        """The rows of a ds_ext optimizer, one for each stage."""
        rules = memory.rules_of(optimizer, self.model, options.params)
        name = optimizer_names.in_config(optimizer.__name__)
        for stage in options.stages:
            label = f"{name}, {'plain step()' if stage is None else f'ZeRO-{stage}'}"
            if options.offloads:
                label += f", {' and '.join(options.offloads)} offloaded"
            of = (rules, self.shapes, stage, options.ranks, self.dtype)
            in_int8 = options.own.weight_storage == "int8"
            how = (options.bucket, options.accumulates, options.offloads, in_int8)
            yield label, memory.optimizer_memory(*of, *how)

    def _adamw(self, options: PlanOptions) -> Iterator[tuple[str, MemoryUse]]:
        """Rows of DeepSpeed's AdamW, which partitions gradients from stage 2 on."""
        for stage in sorted({stage or 0 for stage in options.stages}):
            use = memory.adamw(self.shapes, stage, options.ranks, self.dtype, options.bucket)
            yield f"AdamW, DeepSpeed ZeRO-{stage}", use
