"""A tensor that ranks keep together is saved in pieces, and read again by any number of ranks.

A piece is ``{"start", "total", "values"}``: elements [start, start + len(values)) of the ``total``
that all ranks keep of a tensor, flattened. A rank that loads reads the elements it needs from
whichever ranks saved them, so the number of ranks and the ZeRO stage may change in between.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_ext.ops.state import Part

Saved = Mapping[str, Any]  # what one rank saved, or a part of it


def piece(values: Tensor, part: Part, **more: Any) -> dict[str, Any]:
    """Returns a piece to be saved, which shares no memory with more than itself.

    Args:
        values: this rank's elements, in any shape.
        part: where they lie in what all ranks keep.
        more: what else is to be saved beside them, such as a shape.

    Raises:
        ValueError: there are more or fewer values than the part has elements.
    """
    values = values.detach()
    if values.numel() != part.stop - part.start:
        raise ValueError(
            f"a tensor of shape {[*values.shape]} cannot be saved where {part.stop - part.start} "
            f"of {part.total} elements belong: a weight or state was replaced by one of another "
            "size."
        )
    if values.untyped_storage().nbytes() > values.nbytes:
        values = values.to("cpu", copy=True)
    return {"start": part.start, "total": part.total, "values": values, **more}


class Pieces:
    """What all ranks saved, read a piece at a time: their files may be mapped, not in memory.

    Args:
        saved: what each rank saved, by rank; nested under keys, the pieces innermost.
    """

    def __init__(self, saved: Sequence[Saved]) -> None:
        self.saved = saved

    def find(self, *keys: str) -> Iterator[Any]:
        """Yields what the ranks saved under these keys, for those of them that saved any."""
        for found in self.saved:
            for key in keys:
                found = found.get(key, {})
            if found:
                yield found

    def first(self, *keys: str) -> Any:
        """Returns what the first rank that saved any saved under these keys; None if none did."""
        return next(self.find(*keys), None)

    def lacks(self, part: Part, *keys: str) -> bool:
        """Returns whether elements of a part were not saved, or were saved of another total."""
        at = part.start
        for found in self._in_order(keys):
            if found["total"] != part.total:
                return True
            if found["start"] <= at:
                at = max(at, found["start"] + found["values"].shape.numel())
        return at < part.stop

    def read(self, part: Part, *keys: str) -> Tensor:
        """Returns the elements of a part, [stop - start], on the CPU in the dtype saved."""
        values, at = torch.empty(0, dtype=torch.float32, device="cpu"), part.start
        for found in self._in_order(keys):
            first = found["start"]
            stop = min(part.stop, first + found["values"].shape.numel())
            if first <= at < stop:
                flat = found["values"].contiguous().view(-1)
                if at == part.start:
                    values = flat.new_empty(part.stop - part.start)
                values[at - part.start : stop - part.start] = flat[at - first : stop - first]
                at = stop
        return values

    def _in_order(self, keys: tuple[str, ...]) -> list[Saved]:
        """The pieces under these keys, by where they start."""
        return sorted(self.find(*keys), key=lambda piece: piece["start"])
