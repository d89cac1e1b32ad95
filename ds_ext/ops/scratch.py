"""Scratch memory of one block, which every block of a pass reuses, so that it stays in the cache.

A pass over gigabytes keeps its temporaries here: it neither requests pages from the system nor
sends temporaries through main memory. Each stream of a GPU has its own, because streams run side by
side.
"""

import math
import threading
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from ds_ext.ops.shard import BLOCK, Block, Shard

# Elements of a block for matrix products on a GPU, and for their updates: 32 MiB of fp32 fit into
# its cache.
SLICE = 2**23
# Elements of a block on a CPU if 8-bit moments are extended to whole groups: many temporaries.
SMALL_BLOCK = BLOCK // 4


T = TypeVar("T")


class _BufferPool:
    """Flat buffers of one dtype, at most ``BLOCK`` elements each, and their last views."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []
        self.views: list[Tensor] = []
        self.used = 0


class _Pools(threading.local):
    def __init__(self) -> None:
        self.of: dict[tuple[torch.dtype, torch.device, int | None], _BufferPool] = {}
        self.loops = [0]  # the number of loops over blocks that have begun and not ended


_pools = _Pools()


def blocks(shard: Shard, limit: int | None = None) -> Iterator[Block]:
    """Yields the blocks of a run; each block frees the scratch memory of the one before.

    Blocks have at most ``limit`` elements, ``BLOCK`` if None. Such loops may be nested.
    """
    yield from _freeing(shard.blocks(limit))


def product_limit(device: torch.device) -> int:
    """The most elements of a run in one matrix product."""
    return BLOCK if device.type == "cpu" else SLICE


def parts(n: int, width: int) -> Iterator[slice]:
    """Yields slices of ``n`` rows of ``width`` elements, a block's worth each, like ``blocks``."""
    step = max(1, BLOCK // max(1, width))
    yield from _freeing(slice(start, min(start + step, n)) for start in range(0, n, step))


def _freeing(items: Iterator[T]) -> Iterator[T]:
    """Yields items; each frees the scratch memory that was used since the loop began."""
    of, loops = _pools.of, _pools.loops
    begin = {key: pool.used for key, pool in of.items()} if loops[0] else {}
    loops[0] += 1
    try:
        for item in items:
            for key, pool in of.items():
                pool.used = begin.get(key, 0)
            yield item
    finally:
        loops[0] -= 1


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized tensor, valid until the next block begins."""
    n = math.prod(shape)
    if n > BLOCK:
        return torch.empty(shape, dtype=dtype, device=device)
    key = dtype, device, _stream(device)
    pool = _pools.of.get(key)
    if pool is None:
        pool = _pools.of[key] = _BufferPool()
    i = pool.used
    pool.used += 1
    if i == len(pool.held):
        pool.held.append(torch.empty(n, dtype=dtype, device=device))
        pool.views.append(pool.held[i])
    elif len(pool.held[i]) < n:
        pool.views[i] = pool.held[i] = torch.empty(n, dtype=dtype, device=device)
    if pool.views[i].shape != shape:
        pool.views[i] = pool.held[i][:n].view(shape)
    return pool.views[i]


def _stream(device: torch.device) -> int | None:
    """The current stream of a GPU; None on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def nbytes(device: torch.device | None = None) -> int:
    """Bytes of this thread's scratch memory on ``device``, or on all devices if None."""
    held = [pool.held for (_, where, _), pool in _pools.of.items() if device in (None, where)]
    return sum(buffer.nbytes for buffers in held for buffer in buffers)


def clear() -> None:
    """Frees this thread's scratch memory until the next pass."""
    _pools.of.clear()


def like(x: Tensor) -> Tensor:
    """``empty`` with the shape, dtype and device of ``x``."""
    return empty(x.shape, x.dtype, x.device)
