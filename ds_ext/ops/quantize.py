"""8-bit runs by bitsandbytes: 256 elements share a scale; a code book has 256 values.

The state is plain tensors, {"code": [n] uint8, "absmax": [ceil(n / 256)] fp32}. The code books are
constants of bitsandbytes.
"""

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from ds_ext.ops.formats import Format
from ds_ext.ops.shard import Block, groups_of

SIZE = 256  # of a block, as in bitsandbytes' own optimizers


def functional() -> ModuleType:
    """bitsandbytes.functional; ValueError if it is not installed."""
    try:
        import bitsandbytes.functional
    except ImportError:
        raise ValueError(
            "nbits=8 needs bitsandbytes, which cannot be imported. Install it "
            '(pip install "ds-ext[8bit]") or set "nbits": 32.'
        ) from None
    return bitsandbytes.functional


@dataclass(frozen=True)
class Quantized:
    """A run that is read and written in blocks that start at multiples of 256."""

    signed: bool
    state: dict[str, Tensor]

    def block(self, b: Block) -> Tensor:
        code, absmax = self._parts(b)
        book = _book(self.signed, code.device)
        x = functional().dequantize_blockwise(code, absmax=absmax, code=book, blocksize=SIZE)
        return cast(Tensor, x.view(b.shape))

    def write_(self, b: Block, new: Tensor) -> None:
        code, absmax = self._parts(b)
        book = _book(self.signed, code.device)
        flat = new.reshape(-1).float()
        new_code, quant_state = functional().quantize_blockwise(flat, code=book, blocksize=SIZE)
        code.copy_(new_code)
        absmax.copy_(quant_state.absmax)

    def _parts(self, b: Block) -> tuple[Tensor, Tensor]:
        assert b.run.start % SIZE == 0, "a block of 8-bit values is read or written in part"
        return self.state["code"][b.run], self.state["absmax"][groups_of(b.run, SIZE)]


def _format(signed: bool) -> Format:
    opened = functools.partial(Quantized, signed)
    return Format(opened, SIZE, torch.uint8, torch.float32, "absmax")


MOMENTS = _format(True), _format(False)  # Adam's m and v


@functools.cache
def _book(signed: bool, device: torch.device) -> Tensor:
    """The values of the codes: bitsandbytes' dynamic map, as its Adam8bit uses it."""
    with torch.device("cpu"):  # else on the user's default device
        book: Tensor = functional().create_dynamic_map(signed=signed)
    return book.to(device)
