"""Runs to step: this rank's run of a weight, and its gradient."""

from typing import NamedTuple

from torch import Tensor

from ds_ext import ops
from ds_ext.ops.shard import Shard


class RunUpdate(NamedTuple):
    """One rank's part in the step of one parameter."""

    param: Tensor  # the key of its state and group
    p: Tensor  # this rank's run of the weight, [len(shard)], updated in place
    g: ops.Gradient  # the same run of the gradient
    shard: Shard  # which elements of the whole parameter the run is
    num_replicas: int = 1  # ranks with equal runs, whose sums ``Layout.total`` adds
