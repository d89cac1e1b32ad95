"""A run that torchrun starts again, on as many ranks as are left: see test_elastic.py.

Usage: torchrun ... -m tests.distributed.elastic_jobs FOLDER
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ds_ext
from tests.distributed.resume_jobs import start, steps, whole

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s
TOTAL = 60


def main() -> None:
    folder = sys.argv[1]
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=30), verbose=False)
    torch.set_num_threads(1)
    engine = start("came", 3)
    if found := ds_ext.newest_checkpoint(folder):
        engine.load_checkpoint(found.folder, found.tag)
    tell(folder, f"start {os.getpid()} {dist.get_world_size()} {engine.global_steps}")
    for step in range(engine.global_steps, TOTAL):
        steps(engine, range(step, step + 1))
        engine.save_checkpoint(folder, tag="newest")
        time.sleep(0.2)  # to be killed in
        tell(folder, f"saved {os.getpid()} {dist.get_world_size()} {engine.global_steps}")
    weights = whole(engine)
    if dist.get_rank() == 0:
        torch.save(weights, Path(folder, "weights.pt"))
    dist.barrier()
    os._exit(0)  # see leave.py


def whole_run() -> dict[str, Any]:
    """The same run on ranks that nothing happens to."""
    engine = start("came", 3)
    before = whole(engine)
    steps(engine, range(TOTAL))
    return {"before": before, "after": whole(engine)}


def tell(folder: str, line: str) -> None:
    with open(Path(folder, f"told.{os.environ['RANK']}"), "a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main()
