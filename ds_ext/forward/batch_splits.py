"""Runs each layer of a model on its batch in pieces, so that a large batch needs little memory.

L. Pudipeddi et al., "Training Large Neural Networks with Constant Memory using a New Execution
Algorithm", arXiv 2002.05645, and J. Lamy-Poirier, "Layered gradient accumulation and modular
pipeline parallelism", arXiv 2106.02679, describe the order. A patent application, US20220383084A1,
is said to cover it.

Gradient accumulation runs the whole model on one micro-batch after another, and keeps the gradients
of all weights. Here all micro-batches go through one layer, then through the next. Each piece is a
checkpointed segment, so a layer's backward pass recomputes one piece at a time. Autograd adds up
the gradient of a weight within that pass and delivers it once, and the step in backward uses it at
once. Only the layers' inputs are kept, for all pieces.
"""

import functools
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ds_ext import logs
from ds_ext.forward import side_effects
from ds_ext.forward.replaced import Forward, restore

_CHECKPOINTS = (
    "split_batch checkpoints each piece of a layer, so gradient_checkpointing is not used"
)


def split_batch(model: nn.Module, splits: int, layers: str | None = None) -> list[str]:
    """Makes each layer of a model run a training batch in pieces, one after another.

    The loss and the gradients are those of the whole batch. A layer keeps only its inputs; its
    backward pass computes each piece again. Arguments whose first dimension is the batch are
    divided; each piece gets all other arguments whole. Each piece draws its own dropout masks. A
    batch of fewer rows than ``splits`` runs row by row. Without gradients, as in evaluation, layers
    run the whole batch at once.

    In bf16, autograd adds up the pieces' gradients of a weight in bf16.

    Args:
        model: the model, before ``fully_shard`` or ``deepspeed.initialize``.
        splits: the number of pieces; 1 undoes an earlier call.
        layers: a regular expression that matches the whole names of the layers; by default the
            members of the model's outermost ``nn.ModuleList`` of modules of one class.

    Returns:
        The names of the layers.

    Raises:
        ValueError: ``splits`` is less than 1, no layers are found, a layer contains another, or a
            layer has batch norms, whose statistics are those of the whole batch. Later, in
            ``forward``: a layer's arguments or results cannot be divided, or it changes its
            attributes, buffers or arguments.
    """
    if type(splits) is not int or splits < 1:
        raise ValueError(f"split_batch: splits is {splits!r}; allowed: a whole number >= 1.")
    found = dict(_repeated(model) if layers is None else _named(model, layers))
    for name, layer in found.items():
        _refuse(name, layer, found)
    for name, layer in found.items():
        inner = restore(layer, InPieces)
        if splits > 1:
            layer.forward = InPieces(layer, inner, name, splits)
    return list(found)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the layers of a model that run their batch in pieces."""
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), InPieces)]


@dataclass
class InPieces(Forward):
    """A layer's ``forward`` in pieces along the first dimension."""

    name: str
    splits: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the pieces and joins their results."""
        if not torch.is_grad_enabled():
            return self.whole(*args, **kwargs)
        if getattr(self.module, "gradient_checkpointing", False):  # transformers' own
            setattr(self.module, "gradient_checkpointing", False)  # noqa: B010  no module or tensor
            logs.show_once(_CHECKPOINTS)
        kwargs |= {"use_cache": False} if kwargs.get("use_cache") else {}
        leaves, spec = tree_flatten((args, kwargs), is_leaf=_is_cache)
        for i in (i for i, x in enumerate(leaves) if _is_cache(x)):
            if leaves[i].get_seq_length():
                raise ValueError(
                    f"split_batch: layer {self.name!r} gets a cache of earlier tokens, with "
                    "gradients enabled. Use torch.no_grad(), or do not pass a cache."
                )
            leaves[i] = None  # a cache that is empty, as under checkpointing
        hidden = next((x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()), None)
        if hidden is None or hidden.ndim < 2:
            raise ValueError(f"split_batch: layer {self.name!r} gets no tensor with a batch.")
        rows = hidden.shape[0]
        count = min(max(rows, 1), self.splits)
        sizes = [rows // count + (i < rows % count) for i in range(count)]
        divided = [self._divided(x, hidden, sizes) for x in leaves]
        with _recorded_in_pieces(len(sizes)):
            pieces = [tree_unflatten([x[i] for x in divided], spec) for i in range(len(sizes))]
            before = side_effects.kept_by(self.module)
            results = [self._run(pieces[0])]
            first = side_effects.kept_by(self.module)
            results += map(self._run, pieces[1:])
        # A cache that the first piece has made serves the others.
        self._refuse_changed(side_effects.changed(before, first, but_caches=True))
        self._refuse_changed(side_effects.changed(first, side_effects.kept_by(self.module)))
        return self._joined(results, sizes)

    def _run(self, piece: Any) -> Any:
        """The result of a piece, a checkpointed segment."""
        before = side_effects.noted(piece)
        args, kwargs = piece
        run = functools.partial(self.whole, **kwargs)
        result = checkpoint(run, *args, use_reentrant=False)
        if not side_effects.is_same(before, side_effects.noted(piece)):
            self._refuse_changed("its arguments")
        return result

    def _refuse_changed(self, what: str | None) -> None:
        """Raises ValueError if there is something that each piece changes."""
        if what is not None:
            raise ValueError(
                f"split_batch: layer {self.name!r} changes {what} in its forward pass, and each "
                "piece of a batch would change it again. Return such values, such as a loss of "
                "routers, for each row; or choose other layers, or gradient_accumulation_steps."
            )

    def _divided(self, x: Any, hidden: Tensor, sizes: Sequence[int]) -> Sequence[Any]:
        """An argument for each piece."""
        rows = hidden.shape[0]
        shape: Sequence[int] = getattr(x, "shape", ())
        if len(shape) == 0 or shape[0] != rows or rows == 1:
            return [x] * len(sizes)
        if not isinstance(x, Tensor):  # flex attention's BlockMask
            raise ValueError(
                f"split_batch: layer {self.name!r} gets a {type(x).__name__} for the whole batch, "
                "which cannot be divided. Use another attention implementation."
            )
        is_like_sequence = len(shape) <= 2 and rows in hidden.shape[1:-1]
        is_stacked = x is not hidden and len(shape) > 2 and rows == shape[1] == 3
        if is_like_sequence or is_stacked:
            raise ValueError(
                f"split_batch: layer {self.name!r} gets a tensor of shape {tuple(shape)} beside a "
                f"batch of shape {tuple(hidden.shape)}, so its first dimension may be the batch or "
                "another one. Choose another number of rows."
            )
        return torch.split(x, list(sizes))

    def _joined(self, results: Sequence[Any], sizes: Sequence[int]) -> Any:
        """The results of all pieces as those of the whole batch."""
        flat, specs = zip(*map(tree_flatten, results), strict=True)
        columns = [*zip(*flat, strict=True)] if len(set(map(str, specs))) == 1 else None
        if columns is None:
            raise ValueError(f"split_batch: layer {self.name!r} returns pieces of several kinds.")
        if not columns or not isinstance(columns[0][0], Tensor):
            raise ValueError(f"split_batch: layer {self.name!r} returns no tensor.")
        if [len(x) for x in columns[0]] != list(sizes):
            raise ValueError(
                f"split_batch: layer {self.name!r} returns {[len(x) for x in columns[0]]} rows for "
                f"pieces of {list(sizes)} rows: the model's layers do not keep the batch in the "
                "first dimension, or depend on an argument that holds it in another one."
            )
        return tree_unflatten([self._one(x, sizes) for x in columns], specs[0])

    def _one(self, values: Sequence[Any], sizes: Sequence[int]) -> Any:
        """One result of all pieces: tensors whose first dimension is a multiple of the rows."""
        if all(isinstance(x, Tensor) and x.ndim for x in values):
            ratios = {(len(x) / size, *x.shape[1:]) for x, size in zip(values, sizes, strict=True)}
            if len(ratios) == 1 and float(next(iter(ratios))[0]).is_integer():
                return torch.cat([*values])
            if {x.shape for x in values} == {values[0].shape} and values[0].shape[:1] == (1,):
                if values[0].ndim > 2:  # one for all rows, such as T5's position bias
                    return values[0]
        elif not any(isinstance(x, Tensor) for x in values) and all(x == values[0] for x in values):
            return values[0]
        raise ValueError(
            f"split_batch: layer {self.name!r} returns {type(values[0]).__name__} values that are "
            "not rows of the batch, such as a loss of its own, so those of the pieces cannot be "
            "joined."
        )


@contextmanager
def _recorded_in_pieces(count: int) -> Iterator[None]:
    """Joins the outputs that transformers records inside a layer, such as routers' logits."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    recorded = capturing._active_collector.get() if capturing else None
    lists = [x for x in (recorded or {}).values() if isinstance(x, list)]
    before = [len(x) for x in lists]
    yield
    for outputs, start in zip(lists, before, strict=True):
        pieces = outputs[start:]
        if pieces and all(isinstance(x, Tensor) for x in pieces):
            each = len(pieces) // count
            outputs[start:] = [torch.cat(pieces[i::each]) for i in range(each)]


def _is_cache(x: Any) -> bool:
    """Whether an argument is one of transformers' caches of keys and values."""
    return hasattr(x, "get_seq_length")


def _repeated(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The members of the outermost lists of at least two modules of one class, by name."""
    inside: set[nn.Module] = set()
    found = False
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or module in inside or len(module) < 2:
            continue
        if len({type(layer) for layer in module}) == 1:
            found = True
            for index, layer in enumerate(module):
                yield f"{name}.{index}".lstrip("."), layer
                inside.update(layer.modules())
    if not found:
        raise ValueError(
            "split_batch: the model has no nn.ModuleList of at least two modules of one class. "
            "Give the names of its layers: ds_ext.split_batch(model, splits, layers=...), instead "
            "of ds_ext.batch_splits in a config."
        )


def _named(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose whole name matches a regular expression."""
    found = [(k, m) for k, m in model.named_modules() if k and re.fullmatch(pattern, k)]
    if not found:
        raise ValueError(f"split_batch: layers={pattern!r} matches no module of the model.")
    yield from found


def _refuse(name: str, layer: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Raises ValueError for a layer that cannot run in pieces."""
    chosen = {id(other): k for k, other in layers.items()}
    for part, module in layer.named_modules():
        if part and id(module) in chosen:
            raise ValueError(
                f"split_batch: layer {name!r} contains layer {chosen[id(module)]!r}; choose one."
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"split_batch: {name}.{part} is a batch norm, whose statistics are those of the "
                "whole batch. Choose other layers, or use gradient_accumulation_steps."
            )
