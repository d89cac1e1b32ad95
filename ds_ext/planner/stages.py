"""Divides a language model's layers into pipeline stages of about the same size.

The division matches DeepSpeed's ``partition_method="parameters"``. The embedding is the first
layer. The norm and the head are the last layer. A tied head is also on the last stage.
"""

import re
from collections.abc import Sequence

from torch import nn

from ds_ext.planner import memory
from ds_ext.planner.memory import Shapes

_LAYER = re.compile(r"^(.*?\blayers|.*?\bh|.*?\bblocks)\.(\d+)\.")


def largest(model: nn.Module, shapes: Shapes, stages: int) -> Shapes:
    """Returns the parameters of the largest stage.

    Args:
        model: a language model of transformers, on any device.
        shapes: the shapes of its parameters. Tied parameters appear once.
        stages: the number of stages.

    Raises:
        ValueError: parameter names do not contain layers, or there are fewer layers than stages.
    """
    ends = [getattr(model, f"get_{end}_embeddings")() for end in ("input", "output")]
    first, last = (getattr(end, "weight", None) for end in ends)
    is_tied = first is not None and first is last
    return max(cut(layers(shapes, is_tied), stages), key=memory.elements)


def layers(shapes: Shapes, is_tied: bool) -> list[Shapes]:
    """Returns a model's parameters layer by layer, in the order of its forward pass.

    Args:
        shapes: the shapes of all parameters of a language model of transformers, by name.
        is_tied: whether the head shares the embedding's matrix.

    Raises:
        ValueError: parameter names do not contain layers.
    """
    numbers = {name: int(found[2]) for name in shapes if (found := _LAYER.match(name))}
    if not numbers:
        raise ValueError("--pipeline-stages: no layers are found among the model's parameters.")
    names = list(shapes)
    first = names.index(next(iter(numbers)))
    made: list[dict[str, tuple[int, ...]]] = [{} for _ in range(max(numbers.values()) + 3)]
    for at, name in enumerate(names):
        own = numbers[name] + 1 if name in numbers else (0 if at < first else -1)
        made[own][name] = shapes[name]
    if is_tied:
        made[-1] |= {name: shape for name, shape in made[0].items() if len(shape) == 2}
    return list(made)


def cut(layers: Sequence[Shapes], stages: int) -> list[Shapes]:
    """Returns the parameters of each stage. Minimizes the size of the largest stage.

    Raises:
        ValueError: there are more stages than layers.
    """
    if stages > len(layers):
        raise ValueError(
            f"--pipeline-stages {stages}: the model has {len(layers)} layers, its embedding and "
            "head among them."
        )
    sizes = [memory.elements(layer) for layer in layers]
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_runs(sizes, middle)) <= stages else (middle + 1, high)
    ends = _runs(sizes, low)
    while len(ends) < stages:  # split off the last layer of a stage with several layers
        ends = sorted({*ends, next(i for i in range(len(layers) - 1, 0, -1) if i not in ends)})
    starts = [0, *ends[:-1]]
    return [
        {name: shape for layer in layers[a:b] for name, shape in layer.items()}
        for a, b in zip(starts, ends, strict=True)
    ]


def _runs(sizes: Sequence[int], most: int) -> list[int]:
    """The ends of consecutive runs, each filled greedily with at most ``most`` elements."""
    ends, held = [], 0
    for i, size in enumerate(sizes):
        if held + size > most:
            ends.append(i)
            held = 0
        held += size
    return [*ends, len(sizes)]
