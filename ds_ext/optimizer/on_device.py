"""The step of a batch on a GPU: gradients are judged there, and numbers are formulas."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch import Tensor

from ds_ext.distributed import lockstep
from ds_ext.ops.batch import Flat, Placed
from ds_ext.ops.formulas import Formula
from ds_ext.ops.triton import launches, memory, verdicts
from ds_ext.ops.triton.memory import Memory
from ds_ext.ops.triton.passes import Table as KernelTable
from ds_ext.optimizer import verdict

if TYPE_CHECKING:
    from ds_ext.optimizer.batches import BatchedStep


def judged(
    step: "BatchedStep",
    own: Memory,
    votes: Mapping[Tensor, Tensor],
    by_sums: bool,
    told: verdict.Told | None,
) -> lockstep.Rule:
    """The rule of a batch, whose numbers are formulas, as a rule of tensors.

    Args:
        step: of the batch.
        own: memory of the bucket's launches.
        votes: by which passes are judged, on the device; empty if not by votes.
        by_sums: whether passes after the first round are judged by its sums.
        told: what the host reads when the step ends, if there is something to judge by.
    """
    rule, by = step.begin(), None
    if votes:
        by = _by_votes(step, votes)
        with memory.using(own):
            _tell(step, by, told, is_square=False)
        launches.next_rule()
    asked = _next(rule, None, own, by)
    if by_sums:
        launches.next_rule()  # this pass, if there is one, runs beside those before it
        with memory.using(own):
            squares = cast(Formula, step.squares())
        *totals, found = yield (*_values(asked), squares.values)
        by = verdicts.Verdict(Flat(found, np.arange(len(found))), step.most())
        with memory.using(own):
            _tell(step, by, told, is_square=True)
        launches.next_rule()
        asked = _next(rule, _answers(asked, totals), own, by)
    while asked:
        answers = yield _values(asked)
        asked = _next(rule, _answers(asked, answers), own, by)


def _by_votes(step: "BatchedStep", votes: Mapping[Tensor, Tensor]) -> verdicts.Verdict:
    """The verdict by votes on the device."""
    found = [votes[param] for param in step.params]
    pointers = np.array([x.data_ptr() for x in found], dtype=np.int64)
    most = np.full(len(found), verdict.ARE_GOOD, dtype=np.float32)
    return verdicts.Verdict(Placed(pointers, found), most)


def _tell(
    step: "BatchedStep", by: verdicts.Verdict, told: verdict.Told | None, is_square: bool
) -> None:
    """Lets the device note what it judges by, for the host to read when the step ends."""
    assert told is not None, "nobody would be told of gradients that are judged on a device"
    at = told.places(step.params, by.most, is_square, step.batch.device)
    cast(KernelTable, step.batch.own).tell(by, at)


def _values(sums: Iterable[Any]) -> tuple[Tensor, ...]:
    """Sums as tensors."""
    return tuple(x.values if isinstance(x, Formula) else x for x in sums)


def _answers(sums: Iterable[Any], totals: Iterable[Tensor]) -> tuple[Any, ...]:
    """Their totals as they were asked for."""
    pairs = zip(sums, totals, strict=True)
    return tuple(Formula.given(x) if isinstance(asked, Formula) else x for asked, x in pairs)


def _next(
    rule: Any, totals: tuple[Any, ...] | None, own: Memory, by: verdicts.Verdict | None
) -> tuple[Any, ...]:
    """What a rule asks for next, nothing at its end; its launches take the bucket's memory."""
    with memory.using(own), verdicts.using(by):
        try:
            asked: tuple[Any, ...] = next(rule) if totals is None else rule.send(totals)
            while not asked:  # which takes no round
                asked = rule.send(())
            return asked
        except StopIteration:
            return ()
