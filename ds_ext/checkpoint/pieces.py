"""Pieces of sharded tensors, which any number of ranks can read, and names in checkpoints.

A piece is ``{"start", "total", "values"}``: elements [start, start + len(values)) of a flattened
tensor with ``total`` elements over all ranks. A rank loads its elements from the pieces of all
ranks that saved. The number of ranks and the ZeRO stage may therefore change.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_ext.errors import CheckpointError
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


@dataclass
class Files(Sequence[Saved]):
    """What each rank saved. Opens a file when it is first read."""

    sources: Sequence[Any]  # the files, by rank
    load: Callable[[Any], Saved]  # returns the contents of a file
    opened: dict[int, Saved] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: Any) -> Any:
        if index not in self.opened:
            self.opened[index] = self.load(self.sources[index])
        return self.opened[index]


@dataclass
class Pieces:
    """Finds the pieces of tensors. Reads first from open files, then from the nearest.

    Ranks of a large world would otherwise open all files, which are ranks² opens.
    """

    saved: Sequence[Saved]  # nested dictionaries of pieces, one for each rank that saved
    # The names that any rank saved, by section ("weights", "state"); None if they are not known, as
    # in checkpoints before 1.1.
    index: Mapping[str, Set[str]] | None = None
    weights: Sequence[Saved] = ()  # dictionaries of pieces of weights that are not in ``saved``
    position: float = 0.0  # this rank's index divided by the number of ranks

    def weight_names(self) -> Set[str]:
        """Returns the names of all saved weights."""
        if self.index is not None:
            return self.index["weights"]
        return {name for found in (*self.saved, *self.weights) for name in found["weights"]}

    def first(self, *keys: str) -> Any:
        """Returns the value under these nested keys from a rank that saved one, or None."""
        return next(self._values(keys), None)

    def require(self, part: Part, what: str, *keys: str) -> None:
        """Raises CheckpointError if a part lacks elements, or the saved tensor has another size."""
        found, stop = self._covering(part, keys)
        if stop < part.stop or any(piece["total"] != part.total for piece in found):
            raise CheckpointError(f"this checkpoint is incomplete: elements of {what} are missing.")

    def read(self, part: Part, *keys: str) -> Tensor:
        """Returns the elements of a part, [stop - start], on the CPU in the saved dtype."""
        values, at = torch.empty(0, dtype=torch.float32, device="cpu"), part.start
        for found in self._covering(part, keys)[0]:
            first = found["start"]
            stop = min(part.stop, _stop(found))
            if first <= at < stop:
                flat = found["values"].contiguous().view(-1)
                if at == part.start:
                    values = flat.new_empty(part.stop - part.start)
                values[at - part.start : stop - part.start] = flat[at - first : stop - first]
                at = stop
        return values

    def _covering(self, part: Part, keys: tuple[str, ...]) -> tuple[list[Saved], int]:
        """Pieces with a part's elements, by start, and the first element that they lack."""
        found: list[Saved] = []
        at = part.start
        values = self._values(keys, part)
        while at < part.stop and (piece := next(values, None)) is not None:
            if piece["start"] < part.stop and _stop(piece) > part.start:
                found = sorted([*found, piece], key=lambda piece: piece["start"])
                at = part.start
                for each in found:
                    at = max(at, _stop(each)) if each["start"] <= at else at
        return found, at

    def _values(self, keys: tuple[str, ...], part: Part | None = None) -> Iterator[Any]:
        """The values under nested keys, first from open files, then from those nearest to a part.

        Ranks usually save equal parts. Without a part, the nearest files are those of this rank.
        """
        for files in self._files(keys):
            opened = files.opened if isinstance(files, Files) else ()
            near = self.position * len(files)
            if part is not None and files:
                near = part.start // max(1, -(-part.total // len(files)))
            for i in sorted(range(len(files)), key=lambda i: (i not in opened, abs(i - near))):
                found = files[i]
                for key in keys:
                    found = found.get(key, {})
                if found:
                    yield found

    def _files(self, keys: tuple[str, ...]) -> list[Sequence[Saved]]:
        """The files that may contain a value under these keys."""
        if self.index is None:
            return [self.saved, self.weights]
        if keys[1] in self.index[keys[0]]:
            return [self.saved]
        return [self.weights] if keys[0] == "weights" else []


def _stop(piece: Saved) -> int:
    """The index after a piece's last element in the whole tensor."""
    return int(piece["start"] + piece["values"].shape.numel())


# Names without the prefixes of torch.compile.


def plain_name(name: str) -> str:
    """Returns the name of a parameter or buffer without the prefixes of torch.compile.

    ``"_orig_mod.layers.0._orig_mod.weight"`` becomes ``"layers.0.weight"``.
    """
    return _COMPILED.sub("", name)


def with_plain_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state that a rank saved, with plain names."""
    return {
        **saved,
        "weights": by_plain_name(saved["weights"]),
        "state": by_plain_name(saved["state"]),
        "groups": [{**g, "params": list(map(plain_name, g["params"]))} for g in saved["groups"]],
    }


def by_plain_name(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same values, with plain names as keys."""
    return {plain_name(name): value for name, value in found.items()}
