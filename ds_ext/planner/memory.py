"""Memory of the rank with the most memory: weights, optimizer state, gradients, master weights.

For ds_ext optimizers, the rules create their state and master weights on the device "meta", so the
arithmetic always agrees with the code. For comparison, the module also computes the memory of AdamW
in DeepSpeed. activations.py measures activations. Not counted: weights that ZeRO-3 gathers for
computation, blocks of PyTorch's operations (at most 8 MiB on a CPU; 256 MiB where they step the
parameters of a GPU), cached norms of updated weights (8 bytes for each 4,096 weights), and memory
that the allocator wastes.
Gradients in flight are those of a GPU, where one more bucket than on a CPU is on its way.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_ext.backward import int8_weights
from ds_ext.backward.streams import IN_FLIGHT
from ds_ext.ops import int8, sixteen_bit
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import zeros
from ds_ext.optimizer import RuleOptimizer, expert_stacks, host_offload


class Stack(tuple[int, ...]):
    """The shape of a parameter whose first dimension is the number of experts."""


Shapes = Mapping[str, tuple[int, ...]]

# DeepSpeed's defaults, in elements.
PERSIST = 10**5  # stage3_param_persistence_threshold: ZeRO-3 keeps no larger ones gathered
SUB_GROUP = 10**9  # zero_optimization.sub_group_size: the most elements that AdamW steps at once

FIRST = 16  # the rank with the most memory is searched among this many first ranks


@dataclass(frozen=True)
class GradientLifetime:
    """How long gradients live: until their bucket is full, or until the end of the step."""

    bucket: int | None  # elements; None to keep all gradients
    behind: int = 0  # how many full buckets live while the next one fills
    staged_bytes: float = 0.0  # per element, that come from the host while a bucket is stepped
    together: bool = False  # whether layers in pieces are ZeRO-3's leaf modules


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one rank."""

    weights: float
    state: float
    gradients: float  # the peak in a step
    master: float  # fp32 copies of 16-bit weights, or the lower halves of such copies
    activations: float = 0.0  # their share of the peak, if counted
    kept: float = 0.0  # of the gradients: bytes that live throughout backward
    staged: float = 0.0  # of the other parts: bytes that come from the host with a bucket
    host: float = 0.0  # offloaded, in the memory of the host
    lifetime: GradientLifetime = GradientLifetime(0)  # of the gradients in backward

    @property
    def total(self) -> float:
        """The total bytes."""
        return self.weights + self.state + self.gradients + self.master + self.activations

    @property
    def constant(self) -> float:
        """Bytes throughout backward: without activations, and gradients of short lives."""
        return self.total - self.activations - self.gradients + self.kept - self.staged


def optimizer_memory(
    rule: Any,
    shapes: Shapes,
    stage: int | None,
    ranks: int,
    dtype: torch.dtype,
    bucket: int,
    accumulates: bool = False,
    offloads: Collection[str] = (),
    in_int8: bool = False,
    persist: int = PERSIST,
) -> MemoryUse:
    """Returns the memory of a rule on the rank with the most memory.

    Args:
        rule: an instance of ``RuleOptimizer.hypers``; or one for each parameter, by name.
        shapes: the shapes of the model's parameters.
        stage: the ZeRO stage; None for a plain ``step()`` on full gradients.
        ranks: the number of data-parallel ranks.
        dtype: the dtype of weights and gradients.
        bucket: reduce_bucket_size, in elements.
        accumulates: whether gradients are kept in fp32 until the step.
        offloads: "param" (stage 3), "optimizer", both or none. Of offloaded parts, one bucket's are
            on the device.
        in_int8: whether large matrices are stored in 8 bits. Their values in bf16, of a bucket that
            is stepped and, at stages 0 to 2, of a module, count as gradients.
        persist: stage3_param_persistence_threshold, in elements.

    Raises:
        ValueError: no matrix can be stored in 8 bits.
    """
    cut = ranks if stage in (1, 2, 3) else 1
    behind = IN_FLIGHT if stage == 3 else 0  # overlap_comm: earlier buckets are not stepped yet
    sizes = [math.prod(shape) for shape in shapes.values()]
    in_flight = sum(sizes) if stage is None else _in_flight(sizes, ranks, bucket, behind)
    rules = rule if isinstance(rule, Mapping) else dict.fromkeys(shapes, rule)
    keeps = stage is not None and accumulates
    kept = 4 * sum(-(-n // cut) for n in sizes) if keeps else 0

    # ZeRO-3 stores padded runs, and keeps small weights gathered in bf16.
    divided, persist = (ranks, persist) if stage == 3 else (1, 0)
    weights = sum(-(-n // divided) + (n if n <= persist else 0) for n in sizes)
    fitting = [math.prod(shape) for shape in shapes.values() if int8.fits(shape, divided)]
    coded = [n // divided for n in fitting if in_int8 and n > persist]
    if in_int8 and not coded:
        of_runs = " ZeRO-3 needs that on each rank, above stage3_param_persistence_threshold."
        raise ValueError(int8_weights.NO_MATRIX + of_runs * (stage == 3))
    widest = max(coded, default=0)
    module = 0 if stage == 3 else widest
    expanded = min(sum(coded), max(bucket // divided, widest) + module)
    kept += expanded * dtype.itemsize

    # A bucket's share of what offload moves to the host is on the device.
    share = min(1.0, max(bucket, *sizes) / sum(sizes))
    runs_away = sum(-(-n // ranks) for n in sizes) if "param" in offloads else 0
    weights += math.ceil(share * runs_away) - runs_away
    states, masters = _stored(rules, shapes, cut, dtype)
    smallest = host_offload.SMALL if "optimizer" in offloads else math.inf
    away = [sum(n for n in part if n >= smallest) for part in (states, masters)]
    states_away, masters_away = away
    host = runs_away * dtype.itemsize + states_away + masters_away
    # Kept gradients are stepped after backward.
    staged_bytes = 0.0 if accumulates else host / sum(sizes)
    return MemoryUse(
        weights=(weights - sum(coded)) * dtype.itemsize + sum(map(int8.nbytes, coded)),
        state=sum(states) - states_away + share * states_away,
        gradients=in_flight * dtype.itemsize + kept,
        master=sum(masters) - masters_away + share * masters_away,
        kept=kept,
        staged=math.ceil(share * runs_away) * dtype.itemsize + share * (states_away + masters_away),
        host=host,
        lifetime=GradientLifetime(
            None if stage is None else bucket, behind, staged_bytes, together=stage == 3
        ),
    )


def shapes_of(model: nn.Module) -> Shapes:
    """Returns the shapes of a model's parameters by name. Tied parameters appear once."""
    stacked = expert_stacks.find(model)
    return {
        name: (Stack if param in stacked else tuple)(param.shape)
        for name, param in model.named_parameters()
    }


def adamw(shapes: Shapes, stage: int, ranks: int, dtype: torch.dtype, bucket: int) -> MemoryUse:
    """Returns the memory of AdamW under DeepSpeed 0.19 with default settings except ``bucket``.

    The ZeRO paper (arXiv 1910.02054, section 3.1) gives the main terms. DeepSpeed adds buckets and
    an fp32 copy of a rank's gradients in the step. From stage 1 on it also adds fp32 copies of fp32
    weights (stage 3 compares a device with its name, which are never equal).
    """
    n, size = elements(shapes), dtype.itemsize
    run: float = n / ranks if stage else n
    gradients: float
    if stage == 0:  # the peak is in the step; fp32 needs no copy
        gradients = 4 * n if size == 4 else size * n + 4 * n
    elif stage == 1:  # the end of backward: all gradients, and a bucket or the run
        gradients = size * (n + max(run, bucket))
    elif stage == 2:  # the peak is in backward before the last reduction, or in the step
        largest = max(map(math.prod, shapes.values()))
        gradients = max(size * (run + bucket + largest), 4 * run)
    else:  # the peak is in a sub-group's step; grad_partitions_flat_buffer and the bucket stay
        gradients = size * (run + bucket) + 4 * min(run, SUB_GROUP)
    return MemoryUse(
        weights=size * (run if stage == 3 else n),  # nothing is gathered in the step
        state=8 * run,
        gradients=gradients,
        master=4 * run if stage or size < 4 else 0,
        kept=size * (n / ranks + bucket) if stage >= 2 else 0,
        lifetime=GradientLifetime(bucket if stage >= 2 else None),
    )


def elements(shapes: Shapes) -> int:
    """Returns the number of elements of a model's parameters."""
    return sum(math.prod(shape) for shape in shapes.values())


def _in_flight(sizes: Sequence[int], ranks: int, bucket: int, behind: int) -> int:
    """The peak gradient elements in backward: three kinds that are alive together.

    One gradient arrives, and is copied if equal parts for all ranks need padding. Others fill the
    bucket. The ``behind`` buckets before it are being reduced and stepped.
    """
    n = sum(sizes)
    most = filling = 0
    earlier = deque([0] * behind, maxlen=behind)
    for size in reversed(sizes):  # about the order of backward
        copy = size if size % ranks else 0
        now = size + max(min(bucket, n - size + copy), copy)
        most = max(most, min(now + sum(earlier), n + copy))
        filling += size
        if filling >= bucket:
            earlier.append(filling)
            filling = 0
    return most


def _stored(
    rules: Mapping[str, Any], shapes: Shapes, cut: int, dtype: torch.dtype
) -> tuple[list[int], list[int]]:
    """The bytes of each state and each master on the rank with the most.

    The first ranks have the longest runs. Which of these ranks has the most memory depends on rows
    that span two runs.
    """
    counts = Counter(
        (rules[name], tuple(shape), isinstance(shape, Stack)) for name, shape in shapes.items()
    )

    def of_rank(rank: int) -> tuple[list[int], list[int]]:
        states, masters = list[int](), list[int]()
        for (rule, shape, stacked), count in counts.items():
            shard = Shard.of_rank(shape, rank, cut)
            run = torch.empty(len(shard), dtype=dtype, device="meta")
            spec = expert_stacks.state_spec(rule, shard) if stacked else rule.state_spec(shard)
            made = zeros(spec, run), sixteen_bit.master(run, rule)
            for found, tree in zip((states, masters), made, strict=True):
                found += count * [x.nbytes for x in tree_leaves(tree) if isinstance(x, Tensor)]
        return states, masters

    return max(map(of_rank, range(min(cut, FIRST))), key=lambda found: sum(map(sum, found)))


def rules_of(
    optimizer: type[RuleOptimizer], model: nn.Module, params: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the rule of each parameter of a model by name; ``params`` is "optimizer.params"."""
    made = optimizer.for_model(model, **params)
    return {name: made.rule_of(param) for name, param in model.named_parameters()}
