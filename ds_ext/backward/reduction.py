"""The gradients of a bucket are summed over the ranks, in place, and judged by all of them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.backward.runs import Run, Voters
from ds_ext.backward.streams import Beside, to_host
from ds_ext.distributed.layout import Layout
from ds_ext.optimizer import verdict


class Reduction:
    """Sums gradients over the ranks that ``layout`` names, beside what the device does otherwise.

    ``size_of`` gives a parameter's elements, padded, and ``comm_dtype`` what its gradient is summed
    in, None for its own. Parameters of ``together`` come from modules that some ranks do not use:
    those that no rank used have no run.
    """

    def __init__(
        self,
        layout: Layout,
        beside: Beside,
        size_of: Mapping[Tensor, int],
        comm_dtype: Callable[[Tensor], torch.dtype | None],
        together: Collection[Tensor],
    ) -> None:
        self.layout = layout
        self.beside = beside
        self.size_of = size_of
        self.comm_dtype = comm_dtype
        self.together = frozenset(together)

    def begin(
        self, grads: dict[Tensor, Tensor | None], voters: Voters
    ) -> Callable[[], dict[Tensor, Run]]:
        """Begins to reduce gradients -> what gives this rank's runs of them, in their memory.

        Of ``voters`` every rank also tells every other whether its gradient has values that are
        not finite or may not stay so when summed: all agree, whichever run they lie in. Of these
        and of ``together`` it tells whether it has a gradient. The host reads what was told of
        ``voters.told`` and of ``together``, and nothing where a bucket has none of them.
        """
        flats = {p: self._zeros(p) if flat is None else flat for p, flat in grads.items()}
        judged = {p: flats[p] for p in grads if p in voters.told or p in voters.untold}
        asked = [*judged, *(p for p in grads if p in self.together and p not in judged)]
        is_read = any(p in self.together or p in voters.told for p in asked)
        self.beside.follow(list(flats.values()))
        with self.beside.work():
            squares, votes = self._votes(judged, [grads[p] is not None for p in asked])
            if votes is not None:  # to be reduced together with gradients
                votes = votes.to(next(iter(flats.values())).dtype)
            runs, votes, wait = self.layout.reduce(flats, votes)
            told = None
            if self.beside.stream is not None:
                wait()
                told = to_host(votes) if votes is not None and is_read else None

        def arrived() -> dict[Tensor, Run]:
            if self.beside.stream is None:
                wait()
            if votes is None:
                return {p: Run(run) for p, run in runs.items()}
            untold = dict(zip(asked, votes.float().unbind(), strict=True)) if voters.untold else {}
            bad: dict[Tensor, Tensor] = {}
            unused: set[Tensor] = set()
            if is_read:
                found = (votes.cpu() if told is None else told()).float()  # fp16 has no ARE_GOOD
                bad = dict(zip(asked, (found > verdict.ARE_GOOD).unbind(), strict=True))
                used = dict(zip(asked, found.tolist(), strict=True))
                unused = {p for p in asked if p in self.together and not used[p]}
            return {
                p: Run(
                    run,
                    bad[p] if p in voters.told else None,
                    squares.get(p),
                    untold[p] if p in voters.untold else None,
                )
                for p, run in runs.items()
                if p not in unused
            }

        return arrived

    def _votes(
        self, flats: dict[Tensor, Tensor], has: list[bool]
    ) -> tuple[dict[Tensor, Tensor], Tensor | None]:
        """Sums of squares, none where more ranks add to them; and votes, None if there are none.

        1 for a gradient, ``IS_BAD`` if it, its sum over the ranks or its square may overflow, and
        0 for none. The first are on ``flats``; of further ones in ``has`` only that they are there.
        """
        squares: dict[Tensor, Tensor] = {}
        if not has:
            return squares, None
        votes = torch.ones(len(has), dtype=torch.float32, device=self.layout.device)
        if flats:
            found = self._found(flats)
            most = [self._most(p, flat) for p, flat in flats.items()]
            good = torch.stack(found) <= _vector(most, found[0])
            votes[: len(flats)].masked_fill_(good.logical_not(), verdict.IS_BAD)
            if not self.layout.is_shared:
                squares = dict(zip(flats, found, strict=True))
        present = torch.tensor(has, dtype=torch.bool, device="cpu")
        return squares, torch.where(present.to(votes.device, non_blocking=True), votes, 0)

    def _found(self, flats: dict[Tensor, Tensor]) -> list[Tensor]:
        """What gradients are judged by: sums of squares, or the largest magnitudes of parts."""
        op = ops.largest if self.layout.is_shared else ops.square_sums_of
        return _of_each(op, flats.values())

    def _most(self, param: Tensor, flat: Tensor) -> float:
        """What that may be at most."""
        if self.layout.is_shared:
            return self._bound(param, flat)
        numel = max(1, self.layout.shard(param).numel)
        return float(torch.finfo(ops.accumulator(flat.dtype)).max / numel)

    def _zeros(self, param: Tensor) -> Tensor:
        """What a rank adds to the sum that has no gradient of a parameter."""
        dtype = self.comm_dtype(param) or param.dtype
        return torch.zeros(self.size_of[param], dtype=dtype, device=param.device)

    def _bound(self, param: Tensor, flat: Tensor) -> float:
        """What no element may exceed so that the sum over the ranks and its squares are finite."""
        squares = (torch.finfo(ops.accumulator(flat.dtype)).max / max(1, flat.numel())) ** 0.5
        return float(min(torch.finfo(flat.dtype).max, squares)) / self.layout.of[param].grad_divisor


def _of_each(op: Callable[[Sequence[Tensor]], Tensor], flats: Iterable[Tensor]) -> list[Tensor]:
    """What ``op`` gives of tensors, [] each, of all that have one dtype at a time; in fp64."""
    flats = list(flats)
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(flat.dtype for flat in flats):
        numbers = [i for i, flat in enumerate(flats) if flat.dtype == dtype]
        found |= zip(numbers, op([flats[i] for i in numbers]).double(), strict=True)
    return [found[i] for i in range(len(flats))]


def _vector(numbers: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device="cpu").to(like.device, non_blocking=True)
