"""Bytes that one rank holds where PyTorch's FSDP2 cuts a model, by layers and the rest.

``fully_shard`` is applied to each layer and then to the model, as docs/guides/fsdp2.md has it. A
rank has as many whole rows of each parameter as every other, the last ones fewer; what holds
weights is padded alike. The rest of the model, embedding and head, is gathered all through a step
and its gradients are reduced when backward ends. Not counted: the weights that are gathered.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ds_ext.distributed import dtensors
from ds_ext.ops import weight_update
from ds_ext.planner import memory
from ds_ext.planner.memory import Memory, Shapes

LAYER = re.compile(r"(.*?\.)?\d+\.")  # as the names of a layer's parameters begin


def ours(
    rule: Any,
    shapes: Shapes,
    ranks: int,
    dtype: torch.dtype,
    bucket: int,
    accumulates: bool = False,
) -> Memory:
    """Returns the memory of a rule that steps parts as FSDP2 reduces their gradients.

    Args:
        rule: an instance of ``RuleOptimizer.hypers``; or one for each parameter, by name.
        shapes: the model's parameters.
        ranks: how many hold the parts of one copy.
        dtype: that of weights, and of gradients on their way.
        bucket: elements of parts that are stepped together.
        accumulates: whether this rank's parts of gradients are kept until the step, in fp32.
    """
    rules = rule if isinstance(rule, Mapping) else dict.fromkeys(shapes, rule)
    n = parts(shapes, ranks)
    size = dtype.itemsize

    def state(rule: Any, p: Tensor, *of: Any) -> Any:
        return memory.state(rule, p, *of)

    def master(rule: Any, p: Tensor, *_: Any) -> Any:
        return weight_update.master(p, rule)

    kept = 4 * n if accumulates else size * min(n, bucket + max(units(shapes)) // ranks)
    held = [
        memory.most_held(init, rules, shapes, ranks, dtype, dtensors.rows_of)
        for init in (state, master)
    ]
    return Memory(size * n, held[0], size * on_their_way(shapes) + kept, held[1])


def torchs_adamw(shapes: Shapes, ranks: int, dtype: torch.dtype) -> Memory:
    """The same of torch's AdamW, whose moments are of the weights' dtype, by ``.grad``."""
    n, size = parts(shapes, ranks), dtype.itemsize
    return Memory(size * n, 2 * size * n, size * (on_their_way(shapes) + n), 0)


def parts(shapes: Shapes, ranks: int) -> int:
    """Elements of a rank's parts: whole rows, padded to those of the first rank."""
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes.values())


def units(shapes: Shapes) -> list[int]:
    """Elements of each unit, that of what is in no layer first."""
    found = Counter({"": 0})
    for name, shape in shapes.items():
        layer = LAYER.match(name)
        found[layer[0] if layer else ""] += math.prod(shape)
    return list(found.values())


def on_their_way(shapes: Shapes) -> int:
    """The most elements of whole gradients in backward.

    Those of a layer and the copy that is reduced of it, or of the layer before, beside what has
    come of the rest; at its end those of the rest and their copy.
    """
    rest, *layers = units(shapes)
    return max(rest + 2 * max(layers, default=0), 2 * rest + max(layers, default=0))
