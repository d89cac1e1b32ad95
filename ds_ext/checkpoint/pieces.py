"""Pieces of sharded tensors, which any number of ranks can read, and names in checkpoints.

A piece is ``{"start", "total", "values"}``: elements [start, start + len(values)) of a flattened
tensor with ``total`` elements over all ranks. A rank loads its elements from the pieces of all
ranks that saved. The number of ranks and the ZeRO stage may therefore change.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_ext.ops.state import Part

Saved = Mapping[str, Any]  # the state that one rank saved, or a part of it
_COMPILED = re.compile(r"(?<![^.])_orig_mod\.")  # torch.compile(module) adds it


def piece(values: Tensor, part: Part, **more: Any) -> dict[str, Any]:
    """Returns a piece to save. Its storage contains no other elements.

    Args:
        values: this rank's elements, in any shape.
        part: the position of the elements in the whole tensor.
        more: further values to save, such as a shape.

    Raises:
        ValueError: the number of values differs from the size of the part.
    """
    values = values.detach()
    if values.numel() != part.stop - part.start:
        raise ValueError(
            f"cannot save a tensor of shape {[*values.shape]}: expected {part.stop - part.start} "
            f"elements (of {part.total} in total). A weight or state was replaced by a tensor of "
            "another size."
        )
    if values.untyped_storage().nbytes() > values.nbytes:
        values = values.to("cpu", copy=True)
    return {"start": part.start, "total": part.total, "values": values, **more}


class Pieces:
    """Reads the pieces of all ranks, one tensor at a time. Their files may be memory-mapped.

    Args:
        saved: nested dictionaries of pieces, one for each rank.
    """

    def __init__(self, saved: Sequence[Saved]) -> None:
        self.saved = saved

    def of_all_ranks(self, *keys: str) -> Iterator[Any]:
        """Yields the value under these nested keys, for each rank that saved one."""
        for found in self.saved:
            for key in keys:
                found = found.get(key, {})
            if found:
                yield found

    def first(self, *keys: str) -> Any:
        """Returns the value under these keys from the first rank that saved one, or None."""
        return next(self.of_all_ranks(*keys), None)

    def is_incomplete(self, part: Part, *keys: str) -> bool:
        """Returns whether a part has missing elements, or the saved tensor has another size."""
        at = part.start
        for found in self._in_order(keys):
            if found["total"] != part.total:
                return True
            if found["start"] <= at:
                at = max(at, found["start"] + found["values"].shape.numel())
        return at < part.stop

    def read(self, part: Part, *keys: str) -> Tensor:
        """Returns the elements of a part, [stop - start], on the CPU in the saved dtype."""
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
        """The pieces under these keys, ordered by start."""
        return sorted(self.of_all_ranks(*keys), key=lambda piece: piece["start"])


# Names without the prefixes of torch.compile.


def plain_name(name: str) -> str:
    """Returns the name of a parameter or buffer without the prefixes of torch.compile.

    ``"_orig_mod.layers.0._orig_mod.weight"`` becomes ``"layers.0.weight"``.
    """
    return _COMPILED.sub("", name)


def with_plain_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state that a rank saved, with plain names."""
    accumulated = saved["accumulated"]
    return {
        **saved,
        "weights": by_plain_name(saved["weights"]),
        "state": by_plain_name(saved["state"]),
        "groups": [{**g, "params": list(map(plain_name, g["params"]))} for g in saved["groups"]],
        "accumulated": {**accumulated, "gradients": by_plain_name(accumulated["gradients"])},
    }


def by_plain_name(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same values, with plain names as keys."""
    return {plain_name(name): value for name, value in found.items()}
