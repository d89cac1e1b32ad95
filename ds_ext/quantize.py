"""8-bit runs, by bitsandbytes: 256 elements share a scale, and a code book of 256 values.

What is kept is plain tensors, {"code": [n] uint8, "absmax": [ceil(n / 256)] fp32}; the code books
are constants of bitsandbytes. Blocks count from the start of a rank's own run, so how a value is
rounded depends on where the run was cut.
"""

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ds_ext.shard import Block

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


def zeros(n: int, device: torch.device) -> dict[str, Tensor]:
    """The state of a run of zeros."""
    return {
        "code": torch.zeros(n, dtype=torch.uint8, device=device),
        "absmax": torch.zeros(-(-n // SIZE), dtype=torch.float32, device=device),
    }


@dataclass(frozen=True)
class Quantized:
    """A run to be read and written in blocks that start at multiples of 256."""

    state: dict[str, Tensor]
    signed: bool

    def block(self, b: Block) -> Tensor:
        code, absmax = self._parts(b)
        book = _book(self.signed, code.device)
        x = functional().dequantize_blockwise(code, absmax=absmax, code=book, blocksize=SIZE)
        return x.view(b.shape)

    def write_(self, b: Block, new: Tensor) -> None:
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
    return functional().create_dynamic_map(signed=signed).to(device)
