"""The rows of a plan: the memory of each optimizer at each stage, for any micro-batch."""

import functools
from dataclasses import replace

from torch import nn

from ds_ext.config import optimizer_names
from ds_ext.planner import activations, memory, models
from ds_ext.planner.activations import MicroBatch
from ds_ext.planner.memory import MemoryUse
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
        # Bytes of activations and gradients in backward. Many rows share them.
        self._peak = functools.cache(functools.partial(activations.peak, self.config, self.dtype))

    def rows(self, options: PlanOptions) -> dict[str, MemoryUse]:
        """Rows of ds_ext optimizers, and of DeepSpeed's AdamW, by label; without activations."""
        found = {}
        offloaded = f", {' and '.join(options.offloads)} offloaded" * bool(options.offloads)
        common = (options.ranks, self.dtype, options.bucket)
        measure = functools.partial(memory.optimizer_memory, persist=options.persist)
        how = (options.accumulates, options.offloads, options.own.weight_storage == "int8")
        for optimizer in options.optimizers:
            try:
                rules = memory.rules_of(optimizer, self.model, options.params)
            except ValueError as error:
                if not options.has_all_optimizers:
                    raise
                advice = "Without --optimizer, --params must suit all of them: name one."
                raise ValueError(f"{error} {advice}") from None
            name = optimizer_names.in_config(optimizer.__name__)
            for stage in options.stages:
                label = f"{name}, {'plain step()' if stage is None else f'ZeRO-{stage}'}{offloaded}"
                found[label] = measure(rules, self.shapes, stage, *common, *how)
        for stage in sorted({stage or 0 for stage in options.stages}):
            found[f"AdamW, DeepSpeed ZeRO-{stage}"] = memory.adamw(self.shapes, stage, *common)
        return found

    def total(self, use: MemoryUse, batch: MicroBatch | None) -> MemoryUse:
        """Returns the memory of a row, with activations if a micro-batch is given."""
        if batch is None:
            return use
        more = self._peak(batch, use.lifetime) + use.constant - use.total
        return replace(use, activations=max(0.0, more))

    def largest_batch(self, use: MemoryUse, batch: MicroBatch, card: float) -> int:
        """Returns how many batch rows fit ``card`` GiB, by a line through the peaks of two batches.

        These have about 2**16 tokens, or more: with few, the peak is that of gradients.
        """
        if use.total > card * GIB:  # the step does not fit
            return 0
        available = card * GIB - use.constant
        far = batch.splits * max(1, 2**16 // batch.tokens)
        least, one, two = (
            self._peak(replace(batch, rows=rows), use.lifetime) for rows in (1, far, 2 * far)
        )
        most = far + int((available - one) // ((two - one) / far))
        return 0 if least > available else max(1, most)
