"""Reduction of a bucket: gradients are summed over the ranks in place, and the ranks vote."""

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ext.backward.reduced_grad import ReducedGrad, VotedParams, of_each_dtype
from ds_ext.backward.streams import SideStreams, from_host, to_host
from ds_ext.distributed.layout import Layout
from ds_ext.ops.executors.unbatched import largest, square_sums_of
from ds_ext.optimizer import nonfinite


class Reducing(NamedTuple):
    """A bucket that is being reduced."""

    arrived: Callable[[], dict[Tensor, ReducedGrad]]  # waits for the reduction
    blocks: bool  # whether the host has to wait for it
    in_parts: Set[Tensor]  # parameters whose gradient may have further parts


@dataclass
class Reduction:
    """Sums gradients over the ranks of ``layout``, on a side stream if there is one."""

    layout: Layout
    streams: SideStreams | None  # if they are used
    size_of: Mapping[Tensor, int]  # the padded elements of each parameter
    # Returns the dtype that a parameter's gradient is summed in, None for its own.
    comm_dtype: Callable[[Tensor], torch.dtype | None]
    # Parameters of leaf modules, which some ranks may not use. If no rank used a parameter, the
    # result does not contain it.
    leaf_params: Set[Tensor]

    def begin(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        voted_params: VotedParams,
        in_parts: Set[Tensor],
    ) -> Reducing:
        """Begins to reduce gradients to this rank's runs.

        Runs share the memory of the gradients. The ranks also exchange votes: on ``voted_params``,
        whether a gradient is bad or may overflow when summed; on ``leaf_params``, whether a rank
        has a gradient. The host reads the votes on ``voted_params.host`` and ``leaf_params``.

        Args:
            params: the parameters of the bucket.
            grads: the gradient of each, flat and padded; None: this rank has none.
            voted_params: positions of ``params``.
            in_parts: parameters whose gradient may have further parts.
        """
        flats = [self._zeros(p) if g is None else g for p, g in zip(params, grads, strict=True)]
        leaves = {i for i, p in enumerate(params) if p in self.leaf_params}
        voted = sorted(voted_params.host | voted_params.device)
        asked = [*voted, *sorted(leaves.difference(voted))]
        is_read = bool(voted_params.host or leaves)
        streams = self.streams
        with nullcontext() if streams is None else streams.reducing():
            squares: dict[int, Tensor] = {}
            votes: Tensor | None = None
            if asked:
                bounds = [self._bound(params[i], flats[i]) for i in voted]
                has = [grads[i] is not None for i in asked]
                squares, votes = self._votes({i: flats[i] for i in voted}, bounds, has)
                votes = votes.to(flats[0].dtype)  # reduced with gradients
            runs, votes, wait = self.layout.reduce(params, flats, votes)
            read_votes = None
            if streams is not None:
                wait()
                read_votes = to_host(votes) if votes is not None and is_read else None
                make_step_wait = streams.reduced()

        def arrived() -> dict[Tensor, ReducedGrad]:
            if streams is None:
                wait()  # it also keeps the memory that collectives read, as long as this function
            else:
                make_step_wait()
            if votes is None:
                return {p: ReducedGrad(run) for p, run in zip(params, runs, strict=True)}
            on_device: dict[int, Tensor] = {}
            bad: dict[int, Tensor] = {}
            unused: set[int] = set()
            if voted_params.device:
                of_all = zip(asked, votes.float().unbind(), strict=True)
                on_device = {i: vote for i, vote in of_all if i in voted_params.device}
            if is_read:
                # fp16 cannot hold MAX_GOOD_VOTES
                found = (votes.cpu() if read_votes is None else read_votes()).float()
                is_bad = zip(asked, (found > nonfinite.MAX_GOOD_VOTES).unbind(), strict=True)
                bad = {i: x for i, x in is_bad if i in voted_params.host}
                has_any = dict(zip(asked, found.tolist(), strict=True))
                unused = {i for i in leaves if not has_any[i]}
            return {
                p: ReducedGrad(run, bad.get(i), squares.get(i), on_device.get(i))
                for i, (p, run) in enumerate(zip(params, runs, strict=True))
                if i not in unused
            }

        blocks = self.layout.sums_gradients if streams is None else is_read
        return Reducing(arrived, blocks, in_parts)

    def _votes(
        self, flats: dict[int, Tensor], bounds: list[float], has: list[bool]
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Returns the sums of squares by position, and the votes.

        The sums are empty if other ranks add to the gradients.
        A vote is 1 for a finite gradient, 0 for none, and ``BAD_VOTE`` if the gradient, its sum
        over the ranks or its square may overflow: see ``_bound``. The first votes are on ``flats``,
        in order. The others only say whether ``has`` is true.
        """
        squares: dict[int, Tensor] = {}
        votes = torch.ones(len(has), dtype=torch.float32, device=self.layout.device)
        if flats:
            op = largest if self.layout.sums_gradients else square_sums_of
            found = of_each_dtype(op, [*flats.values()])
            good = found <= from_host(bounds, found.dtype, found.device)
            votes[: len(flats)].masked_fill_(good.logical_not(), nonfinite.BAD_VOTE)
            if not self.layout.sums_gradients:
                squares = dict(zip(flats, found, strict=True))
        if not all(has):
            votes = torch.where(from_host(has, torch.bool, votes.device), votes, 0)
        return squares, votes

    def _bound(self, param: Tensor, flat: Tensor) -> float:
        """The largest allowed sum of squares; of summed gradients, the largest magnitude.

        The sum of such gradients over the ranks is finite, and so are its squares.
        """
        if not self.layout.sums_gradients:
            numel = max(1, self.layout.shards[param].numel)
            return float(nonfinite.upper_bound(numel, flat.dtype))
        root = nonfinite.upper_bound(max(1, flat.numel()), flat.dtype) ** 0.5
        divisor = self.layout.placement_of[param].grad_divisor
        return float(min(torch.finfo(flat.dtype).max, root)) / divisor

    def _zeros(self, param: Tensor) -> Tensor:
        """The contribution of a rank that has no gradient of a parameter."""
        dtype = self.comm_dtype(param) or param.dtype
        return torch.zeros(self.size_of[param], dtype=dtype, device=param.device)
