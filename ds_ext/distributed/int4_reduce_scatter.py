"""Reduce-scatter of gradients in 4 bits: inside each host, then across hosts.

This is ZeRO++'s qgZ (Wang et al. 2023, arXiv 2306.10209). An all-to-all inside a host gives each
rank the parts for itself and for its peers on other hosts. The rank adds them up and sends each
peer its part. A gradient is rounded twice, and a rank sends 1 / (ranks of a host) of it across
hosts. Here 256 elements share a scale, sums are in fp32, and any number of elements is allowed.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ds_ext.distributed import groups
from ds_ext.distributed.groups import Group, size_of
from ds_ext.distributed.rank_failure import explained

BLOCK_SIZE = 256  # elements that share a scale
MIN_CODE, MAX_CODE = -8, 7  # codes


def num_bytes(n: int) -> int:
    """Returns the bytes of ``n`` encoded elements."""
    scales = -(-n // BLOCK_SIZE)
    return scales * (BLOCK_SIZE // 2 + 4)


def encode(x: Tensor) -> Tensor:
    """Rounds each 256 elements of a row to multiples of an eighth of their largest magnitude.

    The largest element has the code -8 for both signs, because the scale has a sign too.

    Args:
        x: [..., n], floating point. If one of the 256 is not finite, none is after decoding.

    Returns:
        Bytes, [..., num_bytes(n)].
    """
    padded = functional.pad(x.float(), (0, -x.shape[-1] % BLOCK_SIZE)).unflatten(
        -1, (-1, BLOCK_SIZE)
    )
    least, most = padded.aminmax(dim=-1, keepdim=True)
    scale = torch.where(most > -least, most, least) / MIN_CODE
    parts = padded / torch.where(scale == 0, torch.inf, scale)
    codes = (parts.round_().clamp_(MIN_CODE, MAX_CODE).nan_to_num_() - MIN_CODE).to(torch.uint8)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    return torch.cat([pairs, scale.view(torch.uint8)], -1).flatten(-2)


def decode(code: Tensor, n: int) -> Tensor:
    """Returns the decoded rows of ``n`` elements, [..., n] fp32."""
    found = code.unflatten(-1, (-1, BLOCK_SIZE // 2 + 4))
    pairs, scale = found[..., :-4], found[..., -4:].contiguous().view(torch.float32)
    codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
    values: Tensor = (codes.float() + MIN_CODE) * scale
    return values.flatten(-2)[..., :n]


class Int4ReduceScatter:
    """Sums flat gradients over the ranks of a group; each rank receives its run.

    Args:
        group: the ranks. Those of a host are consecutive.
        size: ranks of a host, at least 2, a divisor of the number of ranks.
    """

    def __init__(self, group: Group, size: int) -> None:
        self.inside, self.across = groups.divided(group, size)
        self.size, self.hosts = size, size_of(group) // size

    def begin(self, flats: Sequence[Tensor], runs: Sequence[Tensor]) -> "Int4Work":
        """Begins to sum ``flats``, each [ranks · n], over the ranks into ``runs``, each [n].

        ``runs`` may be views of ``flats``; ``wait`` of the result writes them.
        """
        return Int4Work(self, flats, runs)

    def num_bytes(self, runs: Sequence[Tensor]) -> int:
        """Returns the bytes that a rank passes to collectives for the sum of ``runs``."""
        return sum(num_bytes(len(run)) for run in runs) * self.hosts * (self.size + 1)


class Int4Work(dist.Work):
    """A sum in progress; see ``Int4ReduceScatter.begin``."""

    def __init__(
        self, spec: Int4ReduceScatter, flats: Sequence[Tensor], runs: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self.spec, self.runs = spec, runs
        parts = [flat.view(spec.hosts, spec.size, -1).transpose(0, 1) for flat in flats]
        self.inside = _Exchange(parts, spec.inside)

    def wait(self, *_: object) -> bool:
        """Writes the runs, on a GPU in the current stream."""
        across = _Exchange(self.inside.added_up(), self.spec.across)
        for run, total in zip(self.runs, across.added_up(), strict=True):
            run.copy_(total)
        return True


class _Exchange:
    """An all-to-all of parts, each [ranks, ..., n]: rank i receives index i of each."""

    def __init__(self, parts: Sequence[Tensor], group: Group) -> None:
        self.lengths = [part.shape[-1] for part in parts]
        self.sent = torch.cat([encode(part) for part in parts], -1)
        self.received = torch.empty_like(self.sent)
        with explained():
            self.work = dist.all_to_all_single(self.received, self.sent, group=group, async_op=True)

    def added_up(self) -> list[Tensor]:
        """Waits for the parts of all ranks, and returns their sums, each [..., n] fp32."""
        self.work.wait()
        codes = self.received.split([num_bytes(n) for n in self.lengths], -1)
        return [decode(code, n).sum(0) for code, n in zip(codes, self.lengths, strict=True)]
