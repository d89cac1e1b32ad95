"""A rank is killed in the middle of a run, which goes on from its newest checkpoint.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc_per_node 2 --max-restarts 1 \
        examples/resume_after_kill.py

The training is that of train_loop.py. In its first life rank 1 kills itself after step 16, as the
kernel does where memory runs out. torchrun starts all ranks again (the variable keeps its store
from telling them where the dead were). They find the checkpoint of step 10, and end with the
weights of a run without a break. On a machine without a GPU, put DS_ACCELERATOR=cpu before it.
Remove runs/resume_after_kill to see it again.
"""

import os
import signal

import train_loop

KILLED_AFTER = 16


def is_first_life() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"


def kill(step: int) -> None:
    """Called after each step: ends rank 1 as nothing can prevent."""
    if step == KILLED_AFTER and os.environ["RANK"] == "1" and is_first_life():
        print(f"rank 1 is killed after step {step}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    train_loop.train(train_loop.options(__doc__, steps=30, save_every=10), after_step=kill)


if __name__ == "__main__":
    main()
