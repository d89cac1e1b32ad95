"""8-bit runs, by bitsandbytes: 256 elements share a scale, and a code book of 256 values.

What is kept is plain tensors, {"code": [n] uint8, "absmax": [ceil(n / 256)] fp32}; the code books
are constants of bitsandbytes.
"""

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar, cast

import torch
from torch import Tensor

from ds_ext.ops.shard import Block, groups_of
from ds_ext.ops.state import Part

SIZE = 256  # of a block, as in bitsandbytes' own optimizers


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


@dataclass(frozen=True)
class Dynamic:
    """The format of a run of numbers, none of which is negative unless it is ``signed``."""

    signed: bool
    size: ClassVar[int] = SIZE

    def state_spec(self, run: slice, total: int) -> dict[str, Part]:
        """Returns what is kept of the values ``run`` of ``total``, which are whole blocks."""
        return {
            "code": Part.of(run, total, torch.uint8),
            "absmax": Part.of(groups_of(run, SIZE), -(-total // SIZE), torch.float32),
        }

    def opened(self, kept: dict[str, Tensor]) -> "Quantized":
        """Returns the values of what ``state_spec`` declared, to be read and written."""
        return Quantized(kept, self.signed)


MOMENTS = Dynamic(signed=True), Dynamic(signed=False)  # Adam's m and v


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
        return self.state["code"][b.run], self.state["absmax"][groups_of(b.run, SIZE)]


@functools.cache
def _book(signed: bool, device: torch.device) -> Tensor:
    """The values of the codes: bitsandbytes' dynamic map, as its Adam8bit takes it."""
    with torch.device("cpu"):  # it is made where the user's tensors are, by default
        book: Tensor = functional().create_dynamic_map(signed=signed)
    return book.to(device)
