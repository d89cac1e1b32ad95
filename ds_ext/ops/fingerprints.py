"""Fingerprints of weights that have residuals; they detect edits between steps.

A 16-bit weight and its 8- or 16-bit residual have no spare bit, so an edited weight (a row set to
zero, a mask, a loaded model) looks like any other. Therefore each ``GROUP`` weights have a 16-bit
fingerprint, a hash of the weights as they were written (the state's key "marks").

If a group's hash differs at the next step, its residuals are dropped. If the edit set weights to
zero, only their residuals are dropped: a weight that a step wrote as zero has no residual, except
for numbers below 1e-40 (fp16: 3e-8). Otherwise the whole group's residuals are dropped, and its
values are the 16-bit weights that the model computes with.
"""

import functools

import torch
from torch import Tensor

from ds_ext.ops import scratch
from ds_ext.ops.schema import GROUP, PRIME1, PRIME2
from ds_ext.ops.shard import Shard

INFINITE = 0x7F80  # the bits of a bf16 infinity; NaNs are larger


def empty_marks(run: Tensor) -> Tensor:
    """Returns uninitialized memory for the fingerprints of a run."""
    return torch.empty(-(-len(run) // GROUP), dtype=torch.int16, device=run.device)


def mark_(run: Tensor, out: Tensor) -> None:
    """Writes the fingerprints of a run into ``out``."""
    for b in scratch.blocks(Shard.whole((len(run),))):
        found = _hashes(run[b.run])
        out[b.run.start // GROUP :][: len(found)] = found


def mend_(run: Tensor, residual: Tensor, marked: Tensor | None) -> None:
    """Sets the residuals of edited weights to zero, in place.

    Args:
        run: the weights, [n] of 16 bits.
        residual: [n] int16 or int8.
        marked: the fingerprints of the run as it was written. Without them (a state from an older
            file), only invalid int16 residuals are dropped: a negative one at zero, a positive one
            at inf, any at NaN. An int8 residual is never invalid.
    """
    is_split = residual.dtype == torch.int16
    for b in scratch.blocks(Shard.whole((len(run),))):
        bits, rest = run[b.run].view(torch.int16), residual[b.run]
        size = torch.bitwise_and(bits, 0x7FFF, out=scratch.like(bits))
        least, most = size.aminmax()
        differs = None
        if marked is not None:
            found = _hashes(run[b.run])
            differs = found != marked[b.run.start // GROUP :][: len(found)]
            if (least > 0 and most < INFINITE or not is_split) and not differs.any():
                continue
        drop = torch.zeros_like(rest, dtype=torch.bool)
        if is_split:  # invalid pairs, even if the group's fingerprint matches by chance
            drop |= ((size == 0) & (rest < 0)) | ((size == INFINITE) & (rest > 0))
            drop |= (size > INFINITE) & (rest != 0)
        if differs is not None:
            drop |= _changed((size == 0) & (rest != 0), differs)
        rest.masked_fill_(drop, 0)


def _changed(zeroed: Tensor, differs: Tensor) -> Tensor:
    """Edited weights of the groups that differ: the zeroed ones, or all if none is; [n] bool."""
    n = len(zeroed)
    groups = torch.nn.functional.pad(zeroed, (0, -n % GROUP)).view(-1, GROUP)
    whole = ~groups.any(dim=1, keepdim=True)
    return ((groups | whole) & differs.unsqueeze(1)).view(-1)[:n]


def _hashes(run: Tensor) -> Tensor:
    """The fingerprints of a block of a run, [n] of 16 bits -> [ceil(n / GROUP)] int16."""
    n = len(run)
    x = scratch.empty((-(-n // GROUP) * GROUP,), torch.int32, run.device)
    x[n:] = 0
    x[:n].copy_(run.view(torch.int16))
    x = x.view(-1, GROUP).mul_(_factors(run.device))
    return x.sum(dim=1, dtype=torch.int32).bitwise_right_shift_(16).to(torch.int16)


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """An odd number for each element of a group, [GROUP] int32."""
    k = torch.arange(1, GROUP + 1, dtype=torch.int64, device="cpu")
    h = k * PRIME1 & 0xFFFFFFFF
    h = (h ^ (h >> 15)) * PRIME2 & 0xFFFFFFFF
    return (h | 1).to(torch.int32).to(device)
