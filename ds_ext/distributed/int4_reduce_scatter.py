"""Gradients summed over ranks in 4 bits: inside each host, then across hosts.

ZeRO++'s qgZ (Wang et al. 2023, arXiv 2306.10209): a rank sends each other one of its host what that
one, or a rank with its place on another host, is to have; these add up and send each other host its
part. So a gradient is rounded twice, and across hosts a rank sends 1 / (ranks of a host) of it.
Here 256 elements share a scale, sums are made in fp32, and any number of elements is allowed.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ds_ext.distributed import groups
from ds_ext.distributed.placement import Group, size_of
from ds_ext.distributed.rank_failure import explained

BLOCK_SIZE = 256  # elements that share a scale
MIN_CODE, MAX_CODE = -8, 7  # codes


def num_bytes(n: int) -> int:
    """Returns how many bytes ``n`` elements are encoded in."""
    scales = -(-n // BLOCK_SIZE)
    return scales * (BLOCK_SIZE // 2 + 4)


def encode(x: Tensor) -> Tensor:
    """Rounds rows, each 256 elements to multiples of an eighth of their largest magnitude.

    The element of that magnitude has the code -8, whatever its sign: the scale has a sign too.

    Args:
        x: [..., n], floating point. Where one of the 256 is not finite, none is when decoded.

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
    """Returns what ``encode`` left of rows of ``n`` elements: [..., n], fp32."""
    found = code.unflatten(-1, (-1, BLOCK_SIZE // 2 + 4))
    pairs, scale = found[..., :-4], found[..., -4:].contiguous().view(torch.float32)
    codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
    values: Tensor = (codes.float() + MIN_CODE) * scale
    return values.flatten(-2)[..., :n]


class Int4ReduceScatter:
    """Sums flat gradients over the ranks of a group, and leaves each rank its run of them.

    Args:
        group: the ranks, those of a host next to one another.
        size: ranks of a host, at least 2, a divisor of their number.
    """

    def __init__(self, group: Group, size: int) -> None:
        self.inside, self.across = groups.divided(group, size)
        self.size, self.hosts = size, size_of(group) // size

    def begin(self, flats: Sequence[Tensor], runs: Sequence[Tensor]) -> "Int4Work":
        """Begins to sum ``flats``, each [ranks · n], over the ranks into ``runs``, each [n].

        ``runs`` may be views of ``flats``; they are written when the sum is waited for.
        """
        return Int4Work(self, flats, runs)

    def num_bytes(self, runs: Sequence[Tensor]) -> int:
        """Returns the bytes that a rank hands to collectives for the sum of such runs."""
        return sum(num_bytes(len(run)) for run in runs) * self.hosts * (self.size + 1)


class Int4Work(dist.Work):
    """A sum on its way; see ``Int4ReduceScatter.begin``."""

    def __init__(
        self, spec: Int4ReduceScatter, flats: Sequence[Tensor], runs: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self.spec, self.runs = spec, runs
        parts = [flat.view(spec.hosts, spec.size, -1).transpose(0, 1) for flat in flats]
        self.inside = _Exchange(parts, spec.inside)

    def wait(self, *_: object) -> bool:
        """Writes the runs: on a GPU in the current stream."""
        across = _Exchange(self.inside.added_up(), self.spec.across)
        for run, total in zip(self.runs, across.added_up(), strict=True):
            run.copy_(total)
        return True


class _Exchange:
    """Sends parts, each [ranks, ..., n], to the ranks of a group: the first to the first rank."""

    def __init__(self, parts: Sequence[Tensor], group: Group) -> None:
        self.lengths = [part.shape[-1] for part in parts]
        self.sent = torch.cat([encode(part) for part in parts], -1)
        self.received = torch.empty_like(self.sent)
        with explained():
            self.work = dist.all_to_all_single(self.received, self.sent, group=group, async_op=True)

    def added_up(self) -> list[Tensor]:
        """Waits for what the ranks have sent, and adds it up: [..., n] of each part, fp32."""
        self.work.wait()
        codes = self.received.split([num_bytes(n) for n in self.lengths], -1)
        return [decode(code, n).sum(0) for code, n in zip(codes, self.lengths, strict=True)]
