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
from ds_ext.planner import activations, fsdp2, lora, memory, models, options, stages
from ds_ext.planner.activations import GradientLifetime, MicroBatch
from ds_ext.planner.memory import MemoryUse
from ds_ext.planner.options import DTYPES, PlanOptions

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
    lora: int = 0  # the rank of adapters, if only adapters are trained
    optimizer: type[RuleOptimizer] | None = None  # None if it is not an optimizer of ds_ext

    @property
    def constant(self) -> float:
        """Bytes throughout backward: without activations, and gradients of short lives."""
        use = self.without_activations
        return use.total - use.gradients - self.staged_bytes + self.kept


class MemoryPlan:
    """The plan of one model.

    Args:
        asked: the options.
        name: the value of ``--model``.
    """

    def __init__(self, asked: PlanOptions, name: str) -> None:
        self.asked, self.name = asked, name
        self.dtype = DTYPES[asked.dtype]
        self.config = models.config(name)
        self.model: nn.Module = models.skeleton(self.config)
        self.shapes = memory.shapes_of(self.model)
        self.n_of_model = memory.elements(self.shapes)
        if asked.pipeline_stages > 1:
            self.shapes = stages.largest(self.model, self.shapes, asked.pipeline_stages)
        self.n = memory.elements(self.shapes)
        self._peaks: dict[tuple[MicroBatch, GradientLifetime, int], int] = {}

    @functools.cached_property
    def rows(self) -> list[Row]:
        """Rows of ds_ext optimizers, LoRA if requested, DeepSpeed's AdamW, and Megatron-LM."""
        found = [row for optimizer in self.asked.optimizers for row in self._ours(optimizer)]
        return [*found, *self._lora(), *self._adamw(), *self._megatron()]

    def changed(self, asked: PlanOptions) -> "MemoryPlan":
        """Returns the plan of the same model and dtype with other options. Reuses activations."""
        other = copy.copy(self)
        other.__dict__.pop("rows", None)
        other.asked = asked
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
        asked = self.asked
        options.check_storage(asked)
        try:
            rules = memory.rules_of(optimizer, self.model, asked.params)
        except ValueError as error:
            raise ValueError(f"{asked.spelled('params')}: {error}") from None
        if asked.accumulates == "projected" and asked.optimizer != options.ALL:
            whole, least = (memory.kept_gradients(rules, self.shapes, 1, x) for x in POLICIES)
            if whole == least:
                name = optimizer.__name__
                raise ValueError(
                    f"{asked.spelled('accumulate')} projected: no gradient of {name} is projected, "
                    "as those of GaLoreAdamW with a rank are. Use sharded."
                )
        if asked.stage == options.FSDP2:
            yield self._by_fsdp2(optimizer, rules)
            return
        offloads = self._offloads(rules)
        for stage in asked.stages:
            label = f"{optimizer.__name__}, {'plain step()' if stage is None else f'ZeRO-{stage}'}"
            if offloads:
                label += f", {' and '.join(offloads)} offloaded"
            ranks = asked.shard_size if stage and asked.shard_size else asked.ranks
            of = (rules, self.shapes, stage, ranks, self.dtype, asked.bucket)
            in_int8 = asked.weight_storage == "int8"
            held, away, home = (
                memory.optimizer_memory(*of, asked.accumulates, offloads, in_int8, visiting)
                for visiting in (None, 0.0, 1.0)
            )
            # Kept gradients are stepped after backward.
            each = 0.0 if asked.accumulates else (home.total - away.total) / self.n
            noted = memory.cached_norms(rules, self.shapes, stage, ranks, self.dtype)
            held = replace(held, state=held.state + noted)
            kept = held.gradients - memory.optimizer_memory(*of).gradients
            behind = IN_FLIGHT if stage == 3 else 0
            bucket = None if stage is None else asked.bucket
            waiting = GradientLifetime(bucket, behind, each, together=stage == 3)
            staged_bytes = held.total - noted - away.total
            yield Row(label, held, waiting, kept, staged_bytes, optimizer=optimizer)

    def _by_fsdp2(self, optimizer: type[RuleOptimizer], rules: Mapping[str, Any]) -> Row:
        """The row of a ds_ext optimizer with FSDP2."""
        asked, ranks = self.asked, self.asked.shard_size or self.asked.ranks
        held = fsdp2.optimizer_memory(
            rules, self.shapes, ranks, self.dtype, asked.bucket, asked.accumulates
        )
        waiting, kept = self._waiting(held)
        return Row(f"{optimizer.__name__}, FSDP2", held, waiting, kept, optimizer=optimizer)

    def _waiting(self, held: MemoryUse) -> tuple[GradientLifetime, float]:
        """With FSDP2: the lifetime of gradients, and the bytes of those that live throughout."""
        most = max(fsdp2.units(self.shapes)[1:], default=1)
        return GradientLifetime(most, behind=1), held.gradients - 2 * most * self.dtype.itemsize

    def _offloads(self, rules: Mapping[str, Any]) -> list[str]:
        """The offloaded parts. Raises ValueError if the engine would refuse the setting."""
        asked = self.asked
        kinds = dict.fromkeys(rules.values())
        has_state = any(config_checks.has_state(rule, self.dtype) for rule in kinds)
        if asked.offload_optimizer and not has_state and asked.optimizer != options.ALL:
            name = type(next(iter(kinds))).__name__
            raise ValueError(f"{asked.spelled('offload_optimizer')}: {name} has next to no state.")
        wanted = {"param": asked.offload_param, "optimizer": asked.offload_optimizer and has_state}
        return [name for name, is_on in wanted.items() if is_on]

    def _lora(self) -> Iterator[Row]:
        rank, stage = self.asked.lora, max(s or 0 for s in self.asked.stages)
        if rank is not None:
            skeleton = models.skeleton(self.config)
            of = (stage, self.asked.ranks, self.dtype, self.asked.bucket)
            label = f"LoRA of rank {rank}, DeepSpeed's AdamW, ZeRO-{stage}"
            yield Row(label, lora.lora(skeleton, rank, *of), lora=rank)

    def _adamw(self) -> Iterator[Row]:
        """Rows of AdamW: DeepSpeed's, which partitions gradients from stage 2 on, and torch's."""
        asked, size = self.asked, self.dtype.itemsize
        for stage in sorted({stage or 0 for stage in asked.stages}):
            held = memory.adamw(self.shapes, stage, asked.ranks, self.dtype, asked.bucket)
            label = f"AdamW, DeepSpeed ZeRO-{stage}"
            if stage < 2:
                yield Row(label, held, GradientLifetime(None))
            else:
                runs = size * (self.n / asked.ranks + asked.bucket)
                yield Row(label, held, GradientLifetime(asked.bucket), runs)
        if asked.stage == options.FSDP2:
            held = fsdp2.torchs_adamw(self.shapes, asked.shard_size or asked.ranks, self.dtype)
            yield Row("AdamW, torch, FSDP2", held, *self._waiting(held))

    def _megatron(self) -> Iterator[Row]:
        kinds = {"fp32": [("fp32", "fp32")], "fp16": [("fp16", "fp16")]}
        kinds["bf16"] = [("bf16", "fp32"), ("fp16", "fp16")]
        for params, grads in kinds[self.asked.dtype]:
            held = memory.megatron(self.shapes, self.asked.ranks, params, grads)
            yield Row(f"Megatron-LM, {params}, {grads} gradients", held, kept=held.gradients)
