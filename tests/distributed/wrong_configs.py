"""A script whose DeepSpeed configs are wrong, as two ranks run it: see test_wrong_configs.py.

What is wrong is told by ``sys.excepthook``, as where a script ends; the last really ends it.
"""

import sys
from typing import Any

import deepspeed
import torch
from torch import nn

import ds_ext  # noqa: F401

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s

SIZES = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
RIGHT = {"optimizer": {"type": "AdaLomo", "params": {"lr": 1e-3}}}
WRONG: dict[str, dict[str, Any]] = {
    "optimizer.type is 'AdaLom'": {"optimizer": {"type": "AdaLom"}},
    "optimizer.params.lrr": {"optimizer": {"type": "AdaLomo", "params": {"lrr": 1}}},
    "prescale_gradients": RIGHT | {"prescale_gradients": True},
    "zero_optimization.stge": RIGHT | {"zero_optimization": {"stge": 3}},
    "train_batch_size": RIGHT | {"train_batch_size": 7},
    "ds_ext.batch_splits = 2 has no effect under": {
        "optimizer": {"type": "AdamW"},
        "ds_ext": {"batch_splits": 2},
    },
    "ds_ext.clip_mode is 'previos'": RIGHT | {"ds_ext": {"clip_mode": "previos"}},
}


def main() -> None:
    for last, config in enumerate(WRONG.values(), 1 - len(WRONG)):
        try:
            deepspeed.initialize(model=nn.Linear(4, 4), config=SIZES | config)
        except Exception:
            if last == 0:
                raise
            sys.excepthook(*sys.exc_info())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
