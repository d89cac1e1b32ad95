"""Runs of a bucket that are stepped as one batch: those that have all but their tensors in common.

A rule that is registered as ``batched`` then makes one pass over all of them where it would make
one over each. Others, and parameters that no native pass takes, are stepped one by one. Which are
which is the same on all ranks, for the ranks' sums have to be in the same order.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.distributed import lockstep
from ds_ext.ops import weight_update
from ds_ext.ops.batch import Batch, Runs, Weights, kind, may_join, stacked
from ds_ext.ops.native import table
from ds_ext.ops.shard import Shard

if TYPE_CHECKING:
    from ds_ext.optimizer.rule_optimizer import RuleOptimizer
    from ds_ext.optimizer.run_updates import RunUpdate


class Piece(NamedTuple):
    """What is stepped as one matrix, or vector: a parameter's run, or that of one expert."""

    p: Tensor  # [len(shard)]
    g: Tensor  # as it was summed, [len(shard)]
    factor: float  # that makes it the gradient
    state: dict[str, Any]
    shard: Shard
    number: int  # of the parameter
    first: int  # number of the run's first element in the parameter
    measured: Tensor | None  # [2] fp64, what writing adds to


def takes(u: "RunUpdate") -> bool:
    """Whether a run can be part of a batch, the native passes being there."""
    return (
        u.g.device.type == "cpu"
        and u.p.dtype in table.DTYPES
        and u.g.dtype in table.DTYPES
        and may_join(u.shard)
        and u.p.is_contiguous()
    )


class BatchedStep:
    """The step of some pieces by one rule."""

    def __init__(self, rule: Any, t: int, bound: float | None, pieces: Sequence[Piece]) -> None:
        self.rule, self.t, self.bound = rule, t, bound
        self.states = [piece.state for piece in pieces]
        self.runs = Runs([piece.p for piece in pieces])
        self.batch = Batch([x.shard for x in pieces], [x.first for x in pieces])
        self.numbers = [piece.number for piece in pieces]
        self.gradients = Runs([piece.g for piece in pieces])
        self.factors = [piece.factor for piece in pieces]
        self.measured = [piece.measured for piece in pieces]

    def begin(self) -> lockstep.Rule:
        """Returns the rule's generator, which steps all of them."""
        p = weight_update.weights(
            self.runs, self.states, self.rule, self.numbers, self.t, self.batch
        )
        if self.measured[0] is not None:
            pointers = np.array([x.data_ptr() for x in self.measured if x is not None])
            p = Weights(p.run, p.how, p.aux, p.keys, pointers.astype(np.uint64))
        g: Any = self.gradients
        if self.bound is not None or any(factor != 1 for factor in self.factors):
            factor = torch.tensor(self.factors, dtype=torch.float32, device="cpu")
            g = ops.Scaled(g, factor, self.bound)
        states = stacked(self.states)
        step: lockstep.Rule = self.rule.step(p, g, states, self.t, self.batch)
        return step

    def end(self) -> None:
        """Notes that masters belong to what the weights are now."""
        weight_update.mark_all(self.runs, self.states, self.batch)


def batches(
    optimizer: "RuleOptimizer", runs: Sequence[tuple["RunUpdate", dict[str, Any]]]
) -> list[BatchedStep]:
    """Returns the batches of runs, each of which comes with its state; the steps are counted."""
    found: dict[tuple[Any, ...], list[Piece]] = {}
    rules: dict[int, Any] = {}
    for u, state in runs:
        row = optimizer.row_of[u.param]
        rule = rules.get(row) or rules.setdefault(row, optimizer.rule_of(u.param))
        optimizer.count_step(u, state, rule)
        bound = None if isinstance(u.g, Tensor) else u.g.bound
        common = row, state["step"], bound, u.p.dtype, u.g.dtype
        for piece in optimizer.pieces(u, state):
            found.setdefault((*common, *kind(piece.shard)), []).append(piece)
    return [
        BatchedStep(rules[row], t, bound, pieces) for (row, t, bound, *_), pieces in found.items()
    ]
