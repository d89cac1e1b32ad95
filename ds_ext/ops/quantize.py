"""8-bit runs, by bitsandbytes: 256 elements share a scale, and a code book of 256 values.

What is kept is plain tensors, {"code": [n] uint8, "absmax": [ceil(n / 256)] fp32}; the code books
are constants of bitsandbytes. Blocks are those of the whole parameter's values: one that a cut
goes through is kept by both ranks, so that a value is rounded alike on any number of them.
"""

import functools
import itertools
from collections.abc import Generator
from dataclasses import dataclass
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from ds_ext.ops import passes
from ds_ext.ops.shard import Block, Shard, outward
from ds_ext.ops.state import Part

SIZE = 256  # of a block, as in bitsandbytes' own optimizers

Edges = Generator[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, Tensor]]


def functional() -> ModuleType:
    """bitsandbytes.functional; ValueError where it is not installed."""
    try:
        import bitsandbytes.functional
    except ImportError:
        raise ValueError(
            "nbits=8 needs bitsandbytes, which cannot be imported. Install it "
            '(pip install "ds-ext[8bit]") or set "nbits": 32.'
        ) from None
    return bitsandbytes.functional


def keeps(run: slice, total: int) -> dict[str, Part]:
    """What is kept of the values ``run`` of ``total``, which are whole blocks."""
    scales = slice(run.start // SIZE, -(-run.stop // SIZE))
    if run.start == run.stop:
        scales = slice(scales.start, scales.start)
    return {
        "code": Part.of(run, total, torch.uint8),
        "absmax": Part.of(scales, -(-total // SIZE), torch.float32),
    }


def complete(g: passes.Gradient, shard: Shard) -> Edges:
    """The elements before and after a run that other ranks have of its first and last block.

    In one round, of the blocks that cuts go through; none if there are none.
    """
    cuts = itertools.chain(*shard.cuts)
    shared = sorted({at // SIZE for at in cuts if at % SIZE})
    dtype = passes.accumulator(g.dtype)
    before = after = torch.zeros(0, dtype=dtype, device=g.device)
    if not shared:
        return before, after
    edges = torch.zeros(len(shared), SIZE, dtype=dtype, device=g.device)
    ends = {shard.start // SIZE, (shard.stop - 1) // SIZE} & set(shared) if len(shard) else set()
    for block in ends:
        start, stop = max(block * SIZE, shard.start), min((block + 1) * SIZE, shard.stop)
        own = passes.flat(slice(start - shard.start, stop - shard.start))
        row = edges[shared.index(block)]
        row[start - block * SIZE : stop - block * SIZE] = passes.read(g, own).reshape(-1)
    (edges,) = yield (edges,)
    run = outward(shard.start, shard.stop, SIZE, shard.numel)
    if run.start < shard.start:
        before = edges[shared.index(run.start // SIZE), : shard.start - run.start]
    if shard.stop < run.stop:
        last = (shard.stop - 1) // SIZE
        after = edges[shared.index(last), shard.stop - last * SIZE : run.stop - last * SIZE]
    return before, after


@dataclass(frozen=True)
class Quantized:
    """A run to be read and written in blocks that start at multiples of 256."""

    state: dict[str, Tensor]
    signed: bool

    def block(self, b: Block) -> Tensor:
        """Returns a block's values, [mats, rows, cols], which are the caller's to overwrite."""
        code, absmax = self._parts(b)
        book = _book(self.signed, code.device)
        x = functional().dequantize_blockwise(code, absmax=absmax, code=book, blocksize=SIZE)
        return cast(Tensor, x.view(b.shape))

    def write_(self, b: Block, new: Tensor) -> None:
        """Writes a block, [mats, rows, cols]."""
        code, absmax = self._parts(b)
        book = _book(self.signed, code.device)
        flat = new.reshape(-1).float()
        new_code, quant_state = functional().quantize_blockwise(flat, code=book, blocksize=SIZE)
        code.copy_(new_code)
        absmax.copy_(quant_state.absmax)

    def _parts(self, b: Block) -> tuple[Tensor, Tensor]:
        assert b.run.start % SIZE == 0, "a block of 8-bit values is read or written in part"
        scales = slice(b.run.start // SIZE, -(-b.run.stop // SIZE))
        return self.state["code"][b.run], self.state["absmax"][scales]


@functools.cache
def _book(signed: bool, device: torch.device) -> Tensor:
    """The values of the codes: bitsandbytes' dynamic map, as its Adam8bit takes it."""
    with torch.device("cpu"):  # it is made where the user's tensors are, by default
        book: Tensor = functional().create_dynamic_map(signed=signed)
    return book.to(device)
