"""Bytes that one rank holds of weights, optimizer state, gradients and masters of weights.

Ours come from the rules: their state is made of tensors without storage, so that this arithmetic
cannot drift from the code; masters come from ``precision`` alike. The rank is the one that holds
most. Beside ours: AdamW in DeepSpeed and Megatron-LM's distributed optimizer. Activations are
counted by activations.py. Not counted: the weights that ZeRO-3 gathers for computing, blocks of
scratch (on a CPU, 8 MiB at most), and what the allocator wastes.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_ext.ops import weight_update
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import nbytes, zeros
from ds_ext.optimizer import RuleOptimizer, expert_stacks, host_offload


class Stack(tuple[int, ...]):
    """The shape of a parameter whose first dimension counts experts."""


Shapes = Mapping[str, tuple[int, ...]]
# Makes what a rule keeps beside a run, of a stack or not.
Init = Callable[[Any, Tensor, Shard, bool], Any]

# DeepSpeed's defaults, in elements.
PERSIST = 10**5  # stage3_param_persistence_threshold: ZeRO-3 keeps smaller parameters gathered
SUB_GROUP = 10**9  # zero_optimization.sub_group_size: the most that one step of AdamW takes

FIRST = 16  # ranks that are looked at for the one that holds most


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: float
    state: float
    gradients: float  # the most that are alive at once
    master: float  # what weights of 16 bits lack to fp32: a copy, or the lower half
    activations: float = 0.0  # what they add to the most that is alive at once, if counted

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.state + self.gradients + self.master + self.activations


def ours(
    rule: Any,
    shapes: Shapes,
    stage: int | None,
    ranks: int,
    dtype: torch.dtype,
    bucket: int,
    accumulates: bool = False,
    offloads: Collection[str] = (),
) -> Memory:
    """Returns the memory of a rule on the rank that holds most.

    Args:
        rule: an instance of ``RuleOptimizer.hypers``; or one for each parameter, by name.
        shapes: the model's parameters.
        stage: the ZeRO stage; None for a plain ``step()`` on whole gradients.
        ranks: how many ranks of data parallelism there are.
        dtype: that of weights and gradients.
        bucket: reduce_bucket_size, in elements.
        accumulates: whether this rank's runs of gradients are kept until the step, in fp32.
        offloads: of "param" (stage 3) and "optimizer", what lies on the host, and on the device
            only as much of it as a bucket takes.
    """
    cut = ranks if stage in (1, 2, 3) else 1
    kept = 4 * sum(-(-math.prod(shape) // cut) for shape in shapes.values())
    in_flight = elements(shapes) if stage is None else _in_flight(shapes, ranks, bucket)
    if stage == 3:  # overlap_comm: the bucket before is on its way
        in_flight = min(in_flight + max(bucket, _largest(shapes)), elements(shapes))
    visiting = min(1.0, max(bucket, _largest(shapes)) / elements(shapes))  # a bucket's share
    whole = _weights(shapes, stage, ranks)
    weights = whole
    if "param" in offloads:
        runs = sum(-(-math.prod(shape) // ranks) for shape in shapes.values())
        weights = whole - runs + math.ceil(visiting * runs)

    rules = rule if isinstance(rule, Mapping) else dict.fromkeys(shapes, rule)

    def held(init: Init) -> float:
        most = most_held(init, rules, shapes, cut, dtype)
        if "optimizer" not in offloads:
            return most
        stays = most_held(lambda *of: _small(init(*of)), rules, shapes, cut, dtype)
        return stays + visiting * (most - stays)

    return Memory(
        weights=weights * dtype.itemsize,
        state=held(state),
        gradients=in_flight * dtype.itemsize + (kept if accumulates and stage is not None else 0),
        master=held(lambda rule, p, *_: weight_update.master(p, rule)),
    )


def state(rule: Any, p: Tensor, shard: Shard, stacked: bool) -> Any:
    """Returns what a rule keeps of a run, which may be of stacked experts, as tensors."""
    return zeros(expert_stacks.keeps(rule, shard) if stacked else rule.keeps(shard), p)


def shapes_of(model: nn.Module) -> Shapes:
    """Shapes of a model's parameters by name, tied ones once."""
    stacked = expert_stacks.find(model)
    return {
        name: (Stack if param in stacked else tuple)(param.shape)
        for name, param in model.named_parameters()
    }


def adamw(shapes: Shapes, stage: int, ranks: int, dtype: torch.dtype, bucket: int) -> Memory:
    """AdamW under DeepSpeed 0.19 with its defaults, all but ``bucket``.

    The terms of the ZeRO paper (arXiv 1910.02054, section 3.1), and what DeepSpeed adds: for the
    step an fp32 copy of a rank's gradients, from stage 1 on fp32 copies of fp32 weights too
    (stage 3 compares a device with its name, which are never equal), and buckets.
    """
    n, size = elements(shapes), dtype.itemsize
    run: float = n / ranks if stage else n
    gradients: float
    if stage == 0:  # in the step; fp32 needs no copy
        gradients = 4 * n if size == 4 else size * n + 4 * n
    elif stage == 1:  # when backward ends, all are there, and then move to a bucket or the run
        gradients = size * (n + max(run, bucket))
    elif stage == 2:  # in backward, the last gradient on its way; or in the step
        gradients = max(size * (run + bucket + _largest(shapes)), 4 * run)
    else:  # in the step, by sub-groups; grad_partitions_flat_buffer and the bucket's are kept
        gradients = size * (run + bucket) + 4 * min(run, SUB_GROUP)
    return Memory(
        weights=size * (run if stage == 3 else n),  # nothing is gathered in the step
        state=8 * run,
        gradients=gradients,
        master=4 * run if stage or size < 4 else 0,
    )


def megatron(shapes: Shapes, ranks: int, params: str, grads: str) -> Memory:
    """Megatron-LM's distributed optimizer with Adam: bytes per parameter from its documentation.

    fp16 with fp16 gradients 4 + 16/d, bf16 with fp32 gradients 6 + 12/d, fp32 8 + 8/d.
    Source: Megatron-LM's API guide, "dist_optimizer".
    """
    n = elements(shapes)
    # weights, gradients; and divided by the ranks: moments, fp32 gradients, fp32 weights
    size, gradient, moments, copy, master = {
        ("fp16", "fp16"): (2, 2, 8, 4, 4),
        ("bf16", "fp32"): (2, 4, 8, 0, 4),
        ("fp32", "fp32"): (4, 4, 8, 0, 0),
    }[params, grads]
    return Memory(
        weights=size * n,
        state=moments * n / ranks,
        gradients=gradient * n + copy * n / ranks,
        master=master * n / ranks,
    )


def elements(shapes: Shapes) -> int:
    """Parameters of a model, counted by element."""
    return sum(math.prod(shape) for shape in shapes.values())


def _weights(shapes: Shapes, stage: int | None, ranks: int) -> int:
    """Elements kept by a rank: all, or its padded runs and whole copies of small parameters."""
    if stage != 3:
        return elements(shapes)
    sizes = [math.prod(shape) for shape in shapes.values()]
    return sum(-(-n // ranks) + (n if n <= PERSIST else 0) for n in sizes)


def _in_flight(shapes: Shapes, ranks: int, bucket: int) -> int:
    """The most gradient elements alive in backward: those in the bucket, and one that arrives.

    The one that arrives is copied where it has to be padded to equal parts for all ranks.
    """
    n = elements(shapes)
    most = 0
    for size in map(math.prod, shapes.values()):
        copy = size if size % ranks else 0
        most = max(most, size + max(min(bucket, n - size + copy), copy))
    return most


def _largest(shapes: Shapes) -> int:
    return max(map(math.prod, shapes.values()))


def most_held(
    init: Init,
    rules: Mapping[str, Any],
    shapes: Shapes,
    cut: int,
    dtype: torch.dtype,
    run_of: Callable[[tuple[int, ...], int, int], Shard] = Shard.of_rank,
) -> int:
    """Returns the bytes that the rank holds which holds most of what ``init`` makes.

    The first ranks have the longest runs; which of them holds most depends on the rows they share.

    Args:
        init: makes what belongs to a run.
        rules: of each parameter, by name.
        shapes: the model's parameters.
        cut: how many runs each parameter is cut into.
        dtype: that of weights.
        run_of: gives the run of a shape that a rank has, of so many.
    """
    counts = Counter(
        (rules[name], tuple(shape), isinstance(shape, Stack)) for name, shape in shapes.items()
    )

    def of_rank(rank: int) -> int:
        total = 0
        for (rule, shape, stacked), count in counts.items():
            shard = run_of(shape, rank, cut)
            run = torch.empty(len(shard), dtype=dtype, device="meta")
            total += count * nbytes(init(rule, run, shard, stacked))
        return total

    return max(map(of_rank, range(min(cut, FIRST))))


def _small(state: Any) -> Any:
    """What of a state stays on the device when states are offloaded."""
    if isinstance(state, Mapping):
        return {key: _small(x) for key, x in state.items()}
    return state if state.nbytes < host_offload.SMALL else ()


def rules_of(
    optimizer: type[RuleOptimizer], model: nn.Module, params: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the rule of each parameter of a model, by name.

    Args:
        optimizer: the class.
        model: on any device, "meta" among them.
        params: "params" of the config's section "optimizer".

    Raises:
        ValueError: as of ``RuleOptimizer.for_model``.
    """
    made = optimizer.for_model(model, **params)
    return {name: made.rule_of(param) for name, param in model.named_parameters()}
