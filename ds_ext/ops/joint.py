"""Joint operations: what the generators of many matrices compute together, as one.

A rule steps one matrix. Where it would run many small operations, such as the products of an
iteration, it yields a ``Joint``. Whoever advances many generators stacks the tensors of those that
yield the same operation for tensors of the same shapes, and runs the operation once. This costs the
host about as much as for one matrix. No rank sends anything.
"""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from ds_ext.ops import block_sizes

Operation = Callable[..., tuple[Tensor, ...]]


class Joint(tuple[Tensor, ...]):
    """Tensors that a generator yields, to receive the results of an operation on them.

    Args:
        operation: a function of stacks of the tensors, [n, ...] each, which returns stacks. Result
            i depends on the tensors i alone. Operations are the same if they compare equal.
        tensors: of one matrix.
    """

    operation: Operation

    def __new__(cls, operation: Operation, *tensors: Tensor) -> "Joint":
        """Keeps the operation beside the tensors."""
        made = super().__new__(cls, tensors)
        made.operation = operation
        return made

    @property
    def key(self) -> Hashable:
        """What joints have in common that are answered together."""
        return self.operation, tuple((x.shape, x.dtype, x.device) for x in self)

    @property
    def most(self) -> int:
        """How many are answered together at most, so that their stacks are as large as a block."""
        limit = block_sizes.product_limit(self[0].device)
        return max(1, limit // max(1, sum(x.numel() for x in self)))


def answers(joints: Sequence[Joint]) -> list[tuple[Tensor, ...]]:
    """Returns the results of joints with one key, in their order."""
    first = joints[0]
    if len(joints) == 1:
        return [tuple(x[0] for x in first.operation(*(x.unsqueeze(0) for x in first)))]
    stacks = [torch.stack(tensors) for tensors in zip(*joints, strict=True)]
    return list(zip(*(x.unbind() for x in first.operation(*stacks)), strict=True))
