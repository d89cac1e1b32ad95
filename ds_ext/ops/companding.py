"""8-bit moments as in FlashAdamW: 32 elements share a 16-bit scale.

The codes follow arXiv 2602.23349. Signed numbers are companded, so that small ones keep more bits
than large ones. Squares are stored as their roots.

    m:  x = m / max|m|,  y = 2 x / (1 + |x|),  code = round(127 y), int8
        y = code / 127,  m = y / (2 − |y|) · scale
    v:  x = sqrt(v) / max sqrt(v),  code = floor(255 x + 1/2), uint8
        v = (code / 255 · scale)²

The scale is the group's largest magnitude. It is an fp16 whose sign bit extends the exponent, for
scales from 2⁻⁴⁴ (6e-14) to 2²⁰. In the normal range of the published fp16, from 6e-5 to 65504, it
holds the same numbers. Below 6e-8 the published fp16 is 0: a gradient of 1e-9 would lose both
moments, and the next update would be as large as a first one. The mantissa has 10 bits, because at
beta2 = 0.999 a root decays by 1/2000 per step, which fewer bits would always round away.

Operations are those that a GPU makes fast with the same bits: x multiplies by the rounded 1 / max,
and ``round`` rounds ties to even. The paper divides instead, and it rounds m in the same way as v.
Updates treat m below 2⁻¹⁰⁰ as 0, and v below 2⁻¹⁰⁰ as 2⁻¹⁰⁰. The root of 2⁻¹⁰⁰ has code 0, because
the scales of roots are at least 2⁻⁴¹.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_ext.ops.expressions import root
from ds_ext.ops.formats import PLAIN, Format
from ds_ext.ops.schema import (
    MAX_SCALE,
    MIN_MOMENT,
    MIN_ROOT_SCALE,
    MIN_SCALE,
    MIN_SQUARE,
    SCALE_CUT,
    SCALE_FIRST,
    SCALE_GROUP,
)
from ds_ext.ops.shard import Block, groups_of


def scale_codes(x: Tensor) -> Tensor:
    """Encodes fp32 scales from ``MIN_SCALE`` to ``MAX_SCALE`` in 16 bits: nearest, ties to even."""
    bits = x.view(torch.int32)
    rounded = (bits + (2 ** (SCALE_CUT - 1) - 1) + ((bits >> SCALE_CUT) & 1)) >> SCALE_CUT
    codes: Tensor = rounded - SCALE_FIRST
    return codes.to(torch.int16)  # keeps the low 16 bits


def scales(codes: Tensor) -> Tensor:
    """Decodes 16-bit scales to fp32."""
    bits: Tensor = ((codes.int() & 0xFFFF) + SCALE_FIRST) << SCALE_CUT
    return bits.view(torch.float32)


@dataclass(frozen=True)
class _Groups:
    """A run that is read and written in blocks that start at multiples of 32."""

    state: dict[str, Tensor]

    def columns(self, name: str) -> dict[str, Tensor]:
        """Returns the tensors that store the values, by their table columns."""
        return {name: self.state["code"], f"{name}_scale": self.state["scale"]}

    def _read(self, b: Block) -> tuple[Tensor, Tensor]:
        """A block's codes in fp32, zero-padded to [groups, 32], and its scales, [groups, 1]."""
        code, scale = self._parts(b)
        found = pad(code.float(), (0, len(scale) * SCALE_GROUP - len(code)))
        return found.view(-1, SCALE_GROUP), scales(scale).unsqueeze(1)

    def _write(self, b: Block, codes: Tensor, scale: Tensor) -> None:
        """Stores codes, [groups, 32], and scales, [groups, 1], of a block."""
        code, kept = self._parts(b)
        code.copy_(codes.view(-1)[: len(code)])
        kept.copy_(scale_codes(scale.float()).view(-1))

    def _parts(self, b: Block) -> tuple[Tensor, Tensor]:
        assert b.run.start % SCALE_GROUP == 0, "a group of 8-bit values is read or written in part"
        return self.state["code"][b.run], self.state["scale"][groups_of(b.run, SCALE_GROUP)]


def _grouped(x: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Values as zero-padded groups, [groups, 32], and scales of at least ``least``, [groups, 1]."""
    x = pad(x.reshape(-1), (0, -x.numel() % SCALE_GROUP)).view(-1, SCALE_GROUP)
    high, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)  # faster than aminmax on a CPU
    return x, torch.maximum(high, -low).clamp_(least, MAX_SCALE)


def _values(x: Tensor, b: Block) -> Tensor:
    """The values of a block, without the padding of its last group."""
    return x.view(-1)[: b.run.stop - b.run.start].view(b.shape)


class SignedGroups(_Groups):
    """Companded signed numbers. 127 y = 254 x / (1 + |x|)."""

    def block(self, b: Block) -> Tensor:
        code, scale = self._read(b)
        return _values(code.div_(254 - code.abs()).mul_(scale), b)

    def write_(self, b: Block, new: Tensor) -> None:
        """Writes a block, [mats, rows, cols], whose numbers below ``MIN_MOMENT`` become 0."""
        new.mul_(new.abs() >= MIN_MOMENT)
        x, scale = _grouped(new, MIN_SCALE)
        x = (x * scale.reciprocal()).clamp_(-1, 1)
        self._write(b, (x * 254).div_(x.abs_().add_(1)).round_(), scale)


class SquareGroups(_Groups):
    """Non-negative numbers, stored as their roots."""

    def block(self, b: Block) -> Tensor:
        code, scale = self._read(b)
        return _values(code.mul_(scale.div_(255)).square_(), b)

    def write_(self, b: Block, new: Tensor) -> None:
        """Writes a block, [mats, rows, cols], and raises its numbers to ``MIN_SQUARE``."""
        new.clamp_(min=MIN_SQUARE)
        x, scale = _grouped(root(new), MIN_ROOT_SCALE)
        steps = scale.reciprocal().mul_(255)
        self._write(b, x.mul_(steps).add_(0.5).floor_().clamp_(max=255), scale)


MOMENT = Format(SignedGroups, SCALE_GROUP, torch.int8, torch.int16)
SQUARES = Format(SquareGroups, SCALE_GROUP, torch.uint8, torch.int16)


def of_bits(nbits: int) -> Format:
    """Returns the storage format of a moment with 32 or 8 bits per element."""
    return MOMENT if nbits == 8 else PLAIN
