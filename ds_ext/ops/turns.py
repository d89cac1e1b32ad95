"""Shares work that one rank does for all, such as Muon's iteration, among the ranks by its cost."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class SharedWork(NamedTuple):
    """The work for one matrix, which rank ``first + (turn + shift) % ranks`` does."""

    cost: float  # in any unit
    ranks: int  # ranks that hold a run of the matrix
    first: int = 0  # the first of them
    shift: int = 0


class SharedParam(NamedTuple):
    """A parameter whose turn is to be chosen."""

    turn: int  # the turn to prefer among equal ones
    ranks: int  # ranks that hold a run of the parameter
    works: tuple[SharedWork, ...]  # one for each matrix, or for each section of a fused one


@functools.lru_cache(4096)
def balanced(params: Sequence[SharedParam]) -> tuple[int, ...]:
    """Returns the turn of each parameter: the most expensive first, on the least loaded ranks.

    The result depends on nothing else, so all ranks choose the same turns, also after a resume.
    """
    loads = {param.ranks: np.zeros(param.ranks) for param in params}
    turns = [param.turn for param in params]
    costs = [max((work.cost for work in param.works), default=0) for param in params]
    for i in sorted(range(len(params)), key=lambda i: -costs[i]):
        preferred, ranks, works = params[i]
        own = loads[ranks]
        candidates = (preferred + np.arange(ranks)) % ranks
        after = [own[x.first + (candidates + x.shift) % x.ranks] + x.cost for x in works]
        if after:
            turns[i] = int(candidates[np.max(after, axis=0).argmin()])
        for x in works:
            own[x.first + (turns[i] + x.shift) % x.ranks] += x.cost
    return tuple(turns)
