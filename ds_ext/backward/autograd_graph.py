"""The nodes of autograd's graphs."""

from collections.abc import Iterator

from torch import Tensor
from torch.autograd.graph import Node


def nodes(loss: Tensor) -> Iterator[Node]:
    """Yields each node of the graph of ``loss`` once."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            yield node
