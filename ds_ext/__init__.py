"""Fine-tune a whole model in the memory of its weights: fused, sharded optimizers for DeepSpeed.

Importing ds_ext registers its optimizers with DeepSpeed by name.
"""

import difflib

from ds_ext import contract as contract  # first: reports an old torch in one sentence
from ds_ext.backward.fuse import fuse_into_backward
from ds_ext.backward.int8_weights import expand_int8, restore_bf16, store_int8
from ds_ext.checkpoint.manifests import Checkpoint, newest_checkpoint
from ds_ext.errors import CheckpointError, LostRankError
from ds_ext.forward.batch_splits import split_batch
from ds_ext.forward.chunked_loss import chunk_loss
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer
from ds_ext.registration import register
from ds_ext.rules import REGISTRY

__version__ = "1.1.0.dev0"
__all__ = [
    *(optimizer.__name__ for optimizer in OPTIMIZERS.values()),
    "RuleOptimizer",
    "chunk_loss",
    "expand_int8",
    "fuse_into_backward",
    "newest_checkpoint",
    "restore_bf16",
    "split_batch",
    "store_int8",
    "Checkpoint",
    "CheckpointError",
    "LostRankError",
]


def __getattr__(name: str) -> type:
    """Returns the optimizer of a registered rule, such as ``ds_ext.AdaLomo``, or an HF callback.

    Callbacks are imported on first use, because they import transformers.
    """
    if name in ("MetricsCallback", "FuseCallback"):
        from ds_ext import hf

        return getattr(hf, name)  # type: ignore[no-any-return]
    optimizer = OPTIMIZERS.get(name.lower())
    if optimizer is None or optimizer.__name__ != name:
        near = difflib.get_close_matches(name, __dir__(), n=1)
        guess = f"Did you mean {near[0]}?" if near else "Import the module of your own rule."
        raise AttributeError(f"module 'ds_ext' has no attribute {name!r}. {guess}")
    return optimizer


def __dir__() -> list[str]:
    """Returns the public names, with those that ``__getattr__`` finds."""
    special = {name for name in globals() if name.startswith("__")}
    yours = {entry.rule.__name__ for entry in REGISTRY.values()}
    return sorted({*special, *__all__, *yours, "FuseCallback", "MetricsCallback"})


register()
