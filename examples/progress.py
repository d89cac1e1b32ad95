"""What the demo shows while it works: a line for each phase, and a bar for those that take time."""

import math
import time
from statistics import mean

import report
from tqdm import tqdm
from transformers import TrainerCallback

PHASES = 5
MEASURED = 2  # the step, from 0, whose live bytes are counted: the state is there by then
ESTIMATED = 2  # steps, after which the time that is left can be told
WIDTH = 90
SHORT = "  {desc} {n_fmt}/{total_fmt} |{bar}|"
BAR = SHORT + "{postfix}"


def phase(number: int, what: str) -> None:
    """Prints what begins."""
    print(f"[{number}/{PHASES}] {what}", flush=True)


class Words:
    """A bar of the tokens that are generated: a `streamer` of transformers."""

    def __init__(self, most: int) -> None:
        most += 1  # the prompt counts as one
        self.bar = tqdm(total=most, desc="tokens", bar_format=SHORT, ncols=WIDTH, leave=False)

    def put(self, value) -> None:
        """Takes the prompt, once, and then each token."""
        self.bar.update()

    def end(self) -> None:
        self.bar.close()


class Progress(TrainerCallback):
    """Draws bars of steps and evaluations; keeps each step's seconds, and live bytes of one."""

    def __init__(self, held_out_rows: int, tells_phases: bool) -> None:
        self.held_out_rows, self.tells_phases = held_out_rows, tells_phases
        self.seconds: list[float] = []
        self.evaluations: list[float] = []  # seconds of each
        self.live = report.Live()
        self.bar = self.batches = None
        self.loss = ""

    def on_train_begin(self, args, state, control, **_):
        self.is_shown = state.is_world_process_zero
        if self.tells_phases and self.is_shown:
            phase(3, "Held-out loss before training, then the steps")
        self.begin_evaluation(args)

    def on_step_begin(self, args, state, control, **_):
        if self.bar is None and self.is_shown:
            bar = {"total": state.max_steps, "bar_format": BAR, "ncols": WIDTH}
            self.bar = tqdm(desc="step", **bar)
            self.tell(args, state)
        if state.global_step == min(MEASURED, state.max_steps - 1):
            self.live.begin()
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        self.seconds.append(time.perf_counter() - self.began)
        self.live.end()
        if self.bar is not None:
            self.bar.update()
        self.tell(args, state)
        is_last = state.global_step == state.max_steps
        control.should_evaluate |= is_last
        if is_last or state.global_step % int(args.eval_steps) == 0:
            self.begin_evaluation(args)

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            self.loss = f"loss {logs['loss']:.2f}, "
            self.tell(args, state)

    def begin_evaluation(self, args) -> None:
        """Draws the bar of an evaluation, before its first batch."""
        if self.is_shown:
            total = math.ceil(self.held_out_rows / (args.eval_batch_size * args.world_size))
            bar = {"total": total, "bar_format": SHORT, "ncols": WIDTH, "mininterval": 0}
            self.batches = tqdm(desc="held-out batch", leave=False, **bar)

    def on_prediction_step(self, args, state, control, **_):
        if self.batches is not None:
            self.batches.update()

    def on_evaluate(self, args, state, control, metrics, **_):
        self.evaluations.append(metrics["eval_runtime"])
        if self.batches is not None:
            self.batches.close()
            self.batches = None
        if self.is_shown:
            tqdm.write(f"  step {state.global_step:3d}: held-out loss {metrics['eval_loss']:.3f}")

    def on_train_end(self, args, state, control, **_):
        if self.bar is not None:
            self.bar.close()

    def tell(self, args, state) -> None:
        """Writes loss and time left behind the bar."""
        if self.bar is None:
            return
        left = remaining(self.seconds, self.evaluations, state.max_steps, int(args.eval_steps))
        told = "estimating the time left" if left is None else f"{left / 60:.1f} min left"
        self.bar.set_postfix_str(self.loss + told)


def remaining(
    steps: list[float], evaluations: list[float], max_steps: int, eval_steps: int
) -> float | None:
    """The seconds that are left, or None before there is something to estimate them by.

    The first step and the first evaluation also compile and warm up, so they do not count if there
    are others.
    """
    done = len(steps)
    if done < ESTIMATED:
        return None
    still = [n for n in range(done + 1, max_steps + 1) if n % eval_steps == 0 or n == max_steps]
    a_step, an_evaluation = (mean(some[1:] or some or [0.0]) for some in (steps, evaluations))
    return (max_steps - done) * a_step + len(still) * an_evaluation
