"""Two runs of finetune.py take their steps in turns, so that both have the machine to themselves.

A machine's speed drifts, by the work of others too: seconds of runs that came one after another
say less than those of steps that came one after another.
"""

import datetime

from torch.distributed import TCPStore
from transformers import TrainerCallback

LONGEST = datetime.timedelta(minutes=30)  # that one run may wait for the other


def serve() -> TCPStore:
    """Where both runs note how far they are; lives as long as what it returns."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Turns(TrainerCallback):
    """Lets each step begin when the other run has ended its own, evaluation included."""

    def __init__(self, given: str) -> None:
        """`given` is PORT,RUN: that of `serve`, and 0 or 1."""
        port, self.run = map(int, given.split(","))
        self.store = TCPStore("127.0.0.1", port, is_master=False, timeout=LONGEST)

    def _is_past(self, run: int, steps: int, rank: int) -> str:
        return f"{run}/{steps}/{rank}"

    def on_step_begin(self, args, state, control, **_):
        self._note(args, state)
        other = state.global_step + self.run  # run 0 goes first
        ranks = range(args.world_size)
        self.store.wait([self._is_past(1 - self.run, other, rank) for rank in ranks])

    def on_train_end(self, args, state, control, **_):
        self._note(args, state)

    def _note(self, args, state) -> None:
        self.store.set(self._is_past(self.run, state.global_step, args.process_index), "")
