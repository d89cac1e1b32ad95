"""The stages of a session on a GPU: each in a process with a time limit, with a result file.

A stage that fails, crashes or takes too long does not stop the others. A stage whose result file
says that it passed is not run again. Stages can therefore run in several commands, and a session
that was cut off goes on where it ended.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import report

ROOT = Path(__file__).parents[2]
PASSED, FAILED, SKIPPED, DONE = "passed", "failed", "skipped", "passed before"
WHEELS = ROOT / "build" / "wheels"  # packages that a machine without a network lacks


@dataclass(frozen=True)
class Stage:
    """A module of this package, whose ``rows`` yields what it finds.

    Attributes:
        name: of the module.
        proves: one sentence for the reader of its result.
        limit: seconds after which it is ended.
    """

    name: str
    proves: str
    limit: int


STAGES = (
    Stage(
        "selftest",
        "Steps of every optimizer equal those of torch's operations on this GPU, for each dtype, "
        "way to store weights and 8-bit format, for whole parameters and the run of a middle rank. "
        "A gradient with NaN changes no bit of its weight and state.",
        180,
    ),
    Stage(
        "kernel_tests",
        "The tests of kernels pass on this GPU, with tensors in its memory. Where there is "
        "compute-sanitizer, it finds no access out of bounds in a step of some optimizers.",
        240,
    ),
    Stage(
        "launch_order",
        "Training has the same bits if each kernel launch waits for the one before "
        "(CUDA_LAUNCH_BLOCKING=1), so no kernel reads memory that another stream still writes.",
        120,
    ),
    Stage(
        "training_memory",
        "The memory of fine-tuning a model of 7B on this GPU.",
        120,
    ),
    Stage(
        "planned_memory",
        "The peak memory of fine-tuning Llama 3.1 8B under ZeRO-3 is what `plan` says, and at most "
        "the weights that ZeRO-3 gathers more.",
        120,
    ),
    Stage(
        "timing",
        "The time of the GPU for a step, without the time of the host: steps are queued behind "
        "a long kernel.",
        90,
    ),
    Stage(
        "training_speed",
        "The speed of fine-tuning models of 7B and 1.1B by optimizers that take turns, and the "
        "time of the kernels in a step: for the rest of it, the GPU waits for the host.",
        120,
    ),
    Stage(
        "ranks",
        "Training with NCCL's collectives, on one rank and on two if there are two GPUs, equals "
        "training in one process without a process group.",
        120,
    ),
    Stage("zero3", "DeepSpeed's ZeRO-3 trains on this GPU as plain PyTorch does.", 90),
)


@dataclass
class Outcome:
    """What became of a stage."""

    stage: Stage
    result: str
    why: str = ""
    seconds: float | None = None
    tables: dict[str, list[Mapping[str, object]]] = field(default_factory=dict)

    def row(self) -> dict[str, object]:
        """A row of the table at the end."""
        return {
            "stage": self.stage.name,
            "result": self.result,
            "s": self.seconds,
            "why": self.why.replace("|", "/")[:160],
        }


@dataclass
class Runner:
    """Runs stages.

    Args:
        is_rehearsal: whether the CPU stands in for a GPU.
        folder: of result files; None: benchmarks/results, of a rehearsal build/rehearsal.
        is_fresh: whether to repeat stages that have passed.
    """

    is_rehearsal: bool = False
    folder: Path | None = None
    is_fresh: bool = False
    stages: Sequence[Stage] = STAGES

    def __post_init__(self) -> None:
        default = ROOT / "build" / "rehearsal" if self.is_rehearsal else report.RESULTS
        self.folder = self.folder or default

    def run(self, names: Iterable[str]) -> bool:
        """Runs the named stages in their order, prints a table, and returns whether none failed."""
        chosen = [stage for stage in self.stages if stage.name in set(names)]
        outcomes = []
        for stage in chosen:
            outcomes.append(self._outcome(stage))
            last = outcomes[-1]
            print(f"{stage.name}: {last.result} {last.why}".rstrip(), flush=True)
            if last.result in (PASSED, FAILED):
                self._write(last)
        print(report.table([outcome.row() for outcome in outcomes]), flush=True)
        return not any(outcome.result == FAILED for outcome in outcomes)

    def path(self, stage: Stage) -> Path:
        """Returns the path of a stage's result file."""
        assert self.folder is not None
        return report.path_of(f"gpu_{stage.name}", self.folder)

    def has_passed(self, stage: Stage) -> bool:
        """Returns whether a result file says that the stage has passed."""
        path = self.path(stage)
        return not self.is_fresh and path.exists() and f"**{PASSED}**" in path.read_text()

    def _outcome(self, stage: Stage) -> Outcome:
        if self.has_passed(stage):
            return Outcome(stage, DONE, f"see {self.path(stage).name}; --fresh repeats it")
        return run(stage, self.is_rehearsal)

    def _write(self, outcome: Outcome) -> None:
        verdict = f"**{outcome.result}** in {outcome.seconds:.0f} s."
        if outcome.why:
            verdict += f" {outcome.why}"
        title = f"On a GPU: {outcome.stage.name.replace('_', ' ')}"
        text = f"{outcome.stage.proves}\n\nThis stage {verdict}"
        report.write(f"gpu_{outcome.stage.name}", title, text, outcome.tables, folder=self.folder)


def run(stage: Stage, is_rehearsal: bool) -> Outcome:
    """Runs a stage in a process of its own, which is ended with its children after its limit."""
    rows = ROOT / "build" / f"rows_of_{stage.name}_{os.getpid()}"
    rows.parent.mkdir(exist_ok=True)
    rows.unlink(missing_ok=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu", stage.name, str(rows)]
    process = subprocess.Popen(
        [*command, "--rehearse"] if is_rehearsal else command,
        cwd=ROOT,
        env=environment(is_rehearsal),
        start_new_session=True,
    )
    try:
        status: int | None = process.wait(stage.limit)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        try:  # with processes that it has started
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    outcome = read(stage, rows, status)
    outcome.seconds = time.monotonic() - began
    rows.unlink(missing_ok=True)
    return outcome


def environment(is_rehearsal: bool) -> dict[str, str]:
    """The environment of a stage, which can import what was installed into ``WHEELS``."""
    env = dict(os.environ)
    paths = [str(ROOT), str(WHEELS), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if is_rehearsal:
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return env


def read(stage: Stage, path: Path, status: int | None) -> Outcome:
    """What a stage has noted before it ended with an exit status; None: by its limit."""
    outcome = Outcome(stage, PASSED if status == 0 else FAILED)
    for line in path.read_text().splitlines() if path.exists() else []:
        kind, what = json.loads(line)
        if kind == "row":
            heading, row = what
            outcome.tables.setdefault(heading, []).append(row)
        else:
            outcome.result, outcome.why = kind, what.strip().splitlines()[0]
    if status is None:
        outcome.result, outcome.why = FAILED, f"it took longer than {stage.limit} s"
    elif status and not outcome.why:
        outcome.why = f"its process ended with status {status} and no message"
    return outcome
