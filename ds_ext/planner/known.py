"""Bytes of what a GPU notes of weights as it writes them: see ``ops.triton.known.KnownSums``."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from ds_ext.ops.shard import Shard
from ds_ext.ops.triton.passes import DTYPES, Table
from ds_ext.optimizer import plans
from ds_ext.planner.memory import Shapes


def known_sums(rule: Any, shapes: Shapes, stage: int | None, ranks: int, dtype: torch.dtype) -> int:
    """Returns the bytes of what a GPU keeps of weights as they were written, on the first rank.

    Sums of squares that the next step's RMS(p) or norm is made of, and a weight beside each: 8
    bytes for a tile of 4,096 weights; the most, where tiles may be cut in two ways. On a CPU it is
    128 bytes a parameter.

    Args:
        rule: an instance of ``RuleOptimizer.hypers``; or one for each parameter, by name.
        shapes: the model's parameters.
        stage: the ZeRO stage; None for a plain ``step()``.
        ranks: how many ranks of data parallelism there are.
        dtype: that of weights and gradients.
    """
    cut = ranks if stage in (1, 2, 3) else 1
    rules = rule if isinstance(rule, Mapping) else dict.fromkeys(shapes, rule)
    total = 0
    for (own, shape), count in Counter((rules[k], tuple(s)) for k, s in shapes.items()).items():
        shard = Shard.of_rank(shape, 0, cut)
        if dtype in DTYPES and plans.notes_sums(own, shard):
            geometry = (shard.start, len(shard), shard.mats, shard.rows, shard.cols)
            known = Table([geometry], [0], torch.device("meta")).known()
            total += count * known.nbytes("by_matrix" if shard.is_matrix else "flat")
    return total
