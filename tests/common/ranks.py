"""What jobs on real ranks share."""

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ds_ext.ops import int8

REFUSALS = ValueError, RuntimeError  # what is raised in words for a user


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole weights by name, whatever the stage, also of DTensors."""
    params = list(model.parameters())
    with deepspeed.zero.GatheredParameters(params), int8.expanded(params):
        return {n: full(p).clone() for n, p in model.named_parameters()}


def full(x: Tensor) -> Tensor:
    """A whole tensor of one that may be in parts."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def identical(tensors: dict[str, Tensor]) -> bool:
    """Whether all ranks hold the same bits."""
    mine = torch.cat([t.flatten().view(torch.uint8) for t in tensors.values()])
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return torch.equal(low, high)


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """A folder of all ranks, removed when all have left."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        yield folder[0]
        dist.barrier()


@contextlib.contextmanager
def logged(name: str = "ds_ext") -> Iterator[list[str]]:
    """What is logged under a name within the context."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def message(action: Callable[[], Any], *kinds: type[Exception]) -> str:
    """The text of the error of ``action``, or ""; by default a ValueError or RuntimeError."""
    expected = kinds or REFUSALS
    try:
        action()
    except expected as error:
        return str(error)
    return ""
