"""The memory in which gradients wait to be reduced: together, rank by rank, or each in its own.

Gradients that were reduced together in an earlier pass share a tensor [ranks, width], to which each
is copied when it arrives. Row i holds the runs of rank i, so that one collective scatters them all.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from ds_ext.backward.reduced_grad import has_other_users
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.message import Message
from ds_ext.distributed.placement import Placement

# A gradient of more than this fraction of a bucket is reduced in its own memory: until it is
# copied, it needs as much memory again, and a message of this size costs little more than its
# bytes.
LARGE = 1 / 2
ALIGNMENT = 16  # bytes: kernels read vectors from runs that begin at multiples of it


class Pack:
    """The layout of a tensor for gradients that are reduced together, and the tensor, if any.

    Args:
        placement: of the parameters.
        dtype: of the gradients.
        params: the parameters.
        votes: the number of columns for votes.
    """

    def __init__(
        self, placement: Placement, dtype: torch.dtype, params: Iterable[Tensor], votes: int
    ) -> None:
        self.placement = placement
        self.dtype = dtype
        self.columns: dict[Tensor, slice] = {}
        aligned, end = ALIGNMENT // dtype.itemsize, 0
        for param in params:
            width = placement.padded_run(param)
            self.columns[param] = slice(end, end + width)
            end += width + -width % aligned
        self.spare = votes + -votes % aligned
        self.shape = placement.num_shards, end + self.spare
        self.memory: Tensor | None = None

    def place(self, param: Tensor) -> Tensor:
        """Returns the memory of a gradient, [ranks, width]."""
        if self.memory is None:
            self.memory = torch.empty(self.shape, dtype=self.dtype, device=param.device)
        return self.memory[:, self.columns[param]]

    def message(self) -> Message:
        """Gives the tensor away to be reduced."""
        assert self.memory is not None
        memory, self.memory = self.memory, None
        return Message(self.placement, memory, self.columns, self.spare)


class Packing:
    """Keeps gradients of the parameters of ``layout`` until they are reduced.

    Args:
        layout: of the model.
        size: the maximum elements of a bucket.
        comm_dtype: returns the dtype that a parameter's gradient is summed in, None for its own.
    """

    def __init__(
        self, layout: Layout, size: int, comm_dtype: Callable[[Tensor], torch.dtype | None]
    ) -> None:
        self.layout = layout
        self.size = size
        self.comm_dtype = comm_dtype
        self.packs: dict[Tensor, Pack] = {}  # the same on all ranks

    def keep(self, param: Tensor, grad: Tensor, before: Tensor | None) -> Tensor:
        """Returns a gradient, plus an earlier part of it, in memory that may be written to.

        The result is [ranks, width], padded to equal parts for all ranks.
        """
        placement = self.layout.placement_of[param]
        grad = placement.gradient(param, grad)
        # Autograd may pass a view of a gradient that other nodes still have to read.
        is_aliased = placement.is_summed and has_other_users(grad)
        flat = grad.view(-1) if grad.is_contiguous() else grad.reshape(-1)
        pack = self.packs.get(param)
        if pack is not None and before is None:
            place = pack.place(param)
            _copy_padded(flat, place)
            return place
        dtype = self.comm_dtype(param)
        flat = flat if dtype is None else flat.to(dtype)
        missing = placement.padded_numel(param) - flat.numel()
        if missing:
            flat = nn.functional.pad(flat, (0, missing))
        elif is_aliased and flat.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr():
            flat = flat.clone()
        own = flat.view(placement.num_shards, -1)
        if before is None:
            return own
        return before + own if pack is None else before.add_(own)

    def messages(self, grads: Mapping[Tensor, Tensor | None], votes: int) -> list[Message]:
        """Returns the gradients of a bucket as they will be sent; zeros for those that are None.

        ``votes`` is the number of votes that will be sent with them.
        """
        packs = dict.fromkeys(self.packs[p] for p in grads if p in self.packs)
        found: list[Message] = []
        sent: set[Tensor] = set()
        for pack in packs:
            if pack.columns.keys() <= grads.keys():
                for param in pack.columns:
                    if grads[param] is None:
                        pack.place(param).zero_()
                found.append(pack.message())
                sent.update(pack.columns)
            else:  # the bucket has changed
                self._forget(pack)
        alone = [param for param in grads if param not in sent]
        for param in alone:
            grad = grads[param]
            own = self._zeros(param) if grad is None else grad.contiguous()
            columns = {param: slice(0, own.shape[1])}
            found.append(Message(self.layout.placement_of[param], own, columns))
        self._lay_out(grads, votes)
        return found

    def _zeros(self, param: Tensor) -> Tensor:
        """The contribution of a rank that has no gradient of a parameter."""
        placement = self.layout.placement_of[param]
        shape = placement.num_shards, placement.padded_run(param)
        return torch.zeros(shape, dtype=self._dtype(param), device=param.device)

    def _lay_out(self, params: Iterable[Tensor], votes: int) -> None:
        """Lays out tensors for the small gradients of a bucket, unless all of them have one."""
        alike: dict[tuple[Placement, torch.dtype], list[Tensor]] = {}
        for param in params:
            placement = self.layout.placement_of[param]
            is_large = placement.max_padded_numel(param) > LARGE * self.size
            if placement.num_shards > 1 and not is_large:
                alike.setdefault((placement, self._dtype(param)), []).append(param)
        for (placement, dtype), some in alike.items():
            if not self.packs.keys() >= set(some):
                self.packs.update(dict.fromkeys(some, Pack(placement, dtype, some, votes)))

    def _dtype(self, param: Tensor) -> torch.dtype:
        return self.comm_dtype(param) or param.dtype

    def _forget(self, pack: Pack) -> None:
        for param in pack.columns:
            self.packs.pop(param, None)

    def clear(self) -> None:
        """Frees the memory of gradients that are not reduced."""
        for pack in self.packs.values():
            pack.memory = None


def _copy_padded(flat: Tensor, place: Tensor) -> None:
    """Copies a flat gradient to [ranks, width], and pads it with zeros."""
    width = place.shape[1]
    rows, rest = divmod(len(flat), width)
    place[:rows].copy_(flat[: rows * width].view(rows, width))
    if rows < len(place):
        place[rows:].zero_()
        place[rows, :rest].copy_(flat[rows * width :])
