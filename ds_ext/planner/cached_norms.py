"""Memory of the norms of updated weights that are cached on a GPU: ``DeviceNormCache``."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from ds_ext.ops.executors.triton.table import Table
from ds_ext.ops.schema import DTYPES
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import plans
from ds_ext.planner.memory import Shapes


def num_bytes(rule: Any, shapes: Shapes, stage: int | None, ranks: int, dtype: torch.dtype) -> int:
    """Returns the bytes of the cached norms of updated weights on the first rank's GPU.

    The next step computes RMS(p) or the norm from sums of squares. For each tile of 4,096 weights
    the cache has one sum and one weight: 8 bytes. If there are two ways to tile a run, the larger
    cache counts. On a CPU the norms take 128 bytes per parameter.

    Args:
        rule: an instance of ``RuleOptimizer.hypers``; or one for each parameter, by name.
        shapes: the shapes of the model's parameters.
        stage: the ZeRO stage; None for a plain ``step()``.
        ranks: the number of data-parallel ranks.
        dtype: the dtype of weights and gradients.
    """
    cut = ranks if stage in (1, 2, 3) else 1
    rules = rule if isinstance(rule, Mapping) else dict.fromkeys(shapes, rule)
    total = 0
    for (own, shape), count in Counter((rules[k], tuple(s)) for k, s in shapes.items()).items():
        shard = Shard.of_rank(shape, 0, cut)
        if dtype in DTYPES and plans.caches_norms(own, shard):
            geometry = (shard.start, len(shard), shard.mats, shard.rows, shard.cols)
            cache = Table([geometry], [0], torch.device("meta")).new_norm_cache()
            total += count * cache.nbytes("by_matrix" if shard.is_matrix else "flat")
    return total
