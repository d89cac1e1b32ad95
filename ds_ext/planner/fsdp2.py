"""Memory of one rank with PyTorch's FSDP2, applied to each layer and then to the model.

docs/guides/fsdp2.md shows these calls of ``fully_shard``. Each rank has the same number of whole
rows of each parameter, except the last ranks, and buffers are padded to equal sizes. The embedding
and the head stay gathered during a step, and their gradients are reduced at the end of backward.
Gathered weights are not counted.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ds_ext.backward.streams import IN_FLIGHT
from ds_ext.distributed import dtensors
from ds_ext.ops import sixteen_bit
from ds_ext.planner import memory
from ds_ext.planner.memory import MemoryUse, Shapes

LAYER = re.compile(r"(.*?\.)?\d+\.")  # the name prefix of a layer's parameters


def optimizer_memory(
    rule: Any,
    shapes: Shapes,
    ranks: int,
    dtype: torch.dtype,
    bucket: int,
    accumulates: str | None = None,
) -> MemoryUse:
    """Returns the memory of a rule that steps parameters inside backward under FSDP2.

    Args:
        rule: an instance of ``RuleOptimizer.hypers``; or one for each parameter, by name.
        shapes: the shapes of the model's parameters.
        ranks: the number of ranks that share one replica.
        dtype: the dtype of weights, and of gradients before the reduction.
        bucket: the number of elements that are stepped together.
        accumulates: the ``gradient_policy`` by which gradients are kept in fp32 until the step.
    """
    rules = rule if isinstance(rule, Mapping) else dict.fromkeys(shapes, rule)
    n = parts(shapes, ranks)
    size = dtype.itemsize

    def state(rule: Any, p: Tensor, *of: Any) -> Any:
        return memory.state(rule, p, *of)

    def master(rule: Any, p: Tensor, *_: Any) -> Any:
        return sixteen_bit.master(p, rule)

    in_flight = (1 + IN_FLIGHT) * bucket + max(units(shapes)) // ranks
    kept = memory.kept_gradients(rules, shapes, ranks, accumulates) or size * min(n, in_flight)
    held = [
        memory.max_bytes_over_ranks(init, rules, shapes, ranks, dtype, dtensors.rows_of)
        for init in (state, master)
    ]
    return MemoryUse(size * n, held[0], size * peak_full_gradients(shapes) + kept, held[1])


def torchs_adamw(shapes: Shapes, ranks: int, dtype: torch.dtype) -> MemoryUse:
    """Returns the memory of torch's AdamW, with ``.grad`` and moments in the weights' dtype."""
    n, size = parts(shapes, ranks), dtype.itemsize
    return MemoryUse(size * n, 2 * size * n, size * (peak_full_gradients(shapes) + n), 0)


def parts(shapes: Shapes, ranks: int) -> int:
    """Returns the elements of a rank's parts: whole rows, padded to the first rank's number."""
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes.values())


def units(shapes: Shapes) -> list[int]:
    """Returns the elements of each FSDP2 unit. The first has all parameters outside of layers."""
    found = Counter({"": 0})
    for name, shape in shapes.items():
        layer = LAYER.match(name)
        found[layer[0] if layer else ""] += math.prod(shape)
    return list(found.values())


def peak_full_gradients(shapes: Shapes) -> int:
    """Returns the peak number of elements of full gradients in backward.

    During backward these are a layer's gradients, their copy for the reduction, and the gradients
    outside of layers. At the end they are the gradients outside of layers, their copy, and one
    layer's gradients.
    """
    rest, *layers = units(shapes)
    return max(rest + 2 * max(layers, default=0), 2 * rest + max(layers, default=0))
