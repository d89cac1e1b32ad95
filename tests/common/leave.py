"""How a worker ends."""

import os
import sys

import torch.distributed as dist


def leave() -> None:
    """Ends all ranks at once, without the interpreter's teardown.

    torch 2.13 sometimes aborts in there, after all is done (about one run in sixty of a gloo
    group of three: "terminate called without an active exception", with no Python frame left).
    """
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
