"""The gradients of a bucket are summed over the ranks, in place, and judged by all of them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.backward.runs import Run
from ds_ext.backward.streams import Beside, to_host
from ds_ext.distributed.layout import Layout

_BAD = 2.0**20  # beyond any number of ranks


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

    def begin(self, grads: dict[Tensor, Tensor | None]) -> Callable[[], dict[Tensor, Run]]:
        """Begins to reduce gradients -> what gives this rank's runs of them, in their memory.

        Every rank also tells every other whether it has a gradient, and whether that has values
        that are not finite or may not stay so when summed: all agree, whichever run they lie in.
        """
        flats = {p: self._zeros(p) if flat is None else flat for p, flat in grads.items()}
        self.beside.follow(list(flats.values()))
        with self.beside.work():
            squares, votes = self._votes(flats, [flat is not None for flat in grads.values()])
            runs, votes, wait = self.layout.reduce(flats, votes)
            told = None
            if self.beside.stream is not None:
                wait()
                told = to_host(votes)

        def arrived() -> dict[Tensor, Run]:
            if told is None:
                wait()
            found = votes.cpu() if told is None else told()
            made = map(Run, runs.values(), (found >= _BAD).unbind(), squares)
            reduced = dict(zip(grads, made, strict=True))
            if not self.together.isdisjoint(grads):
                used = dict(zip(grads, found.tolist(), strict=True))
                reduced = {p: run for p, run in reduced.items() if used[p]}
            return reduced

        return arrived

    def _votes(
        self, flats: dict[Tensor, Tensor], has: list[bool]
    ) -> tuple[list[Tensor | None], Tensor]:
        """Sums of squares, None where more ranks add to them; and votes on all gradients.

        1 for a gradient, ``_BAD`` if it, its sum over the ranks or its square may overflow, and 0
        for none: in the dtype of the first, to be reduced together with it.
        """
        squares: list[Tensor | None] = [None] * len(flats)
        if not self.layout.is_shared:
            sums = _of_each(ops.square_sums_of, flats.values())
            most = [torch.finfo(ops.accumulator(f.dtype)).max / len(f) for f in flats.values()]
            good = torch.stack(sums) <= _vector(most, sums[0])
            squares = [*sums]
        else:
            found = _of_each(ops.largest, flats.values())
            most = [self._bound(p, flat) for p, flat in flats.items()]
            good = torch.stack(found) <= _vector(most, found[0])
        present = torch.tensor(has, dtype=torch.bool, device="cpu")
        present = present.to(good.device, non_blocking=True)
        votes = torch.full(good.shape, _BAD, dtype=torch.float32, device=good.device)
        votes = votes.masked_fill_(good, 1).to(next(iter(flats.values())).dtype)
        return squares, torch.where(present, votes, 0)

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
