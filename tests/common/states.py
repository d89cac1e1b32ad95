"""States of optimizers: nested containers of tensors and numbers."""

import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def tensors(x: Any) -> Iterator[Tensor]:
    """The tensors in nested dicts, lists and tuples."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple, dict)):
        for inner in x.values() if isinstance(x, dict) else x:
            yield from tensors(inner)


def entries(
    state: dict[str, Any], *above: str
) -> Iterator[tuple[tuple[str, ...], dict[str, Any], Tensor]]:
    """The tensors of nested dicts: the keys above each, the dict that it is in, and itself."""
    for key, x in state.items():
        if isinstance(x, dict):
            yield from entries(x, *above, key)
        elif isinstance(x, Tensor):
            yield (*above, key), state, x


def same(a: Any, b: Any) -> bool:
    """Whether two states have the same structure, dtypes and bits."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def from_file(saved: Any, weights_only: bool = True) -> Any:
    """What was saved to a file and loaded from it, without pickled code if ``weights_only``."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)
