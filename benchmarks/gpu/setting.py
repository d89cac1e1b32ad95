"""What a stage runs on: a GPU with models of 1B and 7B, or the CPU in its place with tiny ones."""

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar
from unittest import mock

import torch

from benchmarks.memory import LLAMAS, Sizes
from ds_ext.ops.executors.native import native_table
from ds_ext.ops.executors.triton import devices
from ds_ext.optimizer import selftest

Row = dict[str, object]
Rows = Iterator[tuple[str, Row]]  # headings of tables, and their rows
Result = TypeVar("Result")
RIGHT, WRONG = "right", "WRONG"  # a stage fails if a row has the verdict WRONG


class Skip(Exception):
    """A stage cannot run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """The device and the sizes of all stages.

    Attributes:
        device: of all tensors.
        small: the model of stages that train several times.
        large: the model whose memory is measured.
        exact: the model that trains in fp32, to be compared with a judge.
        length: tokens of a step.
        steps: of a training run that is measured, and between two events.
        exact_steps: of a training run that is compared with another.
        exact_bucket: elements of its buckets, so that there are several.
        optimizers: whose kernels are checked and timed; None: all.
        sides: of square matrices that are timed.
    """

    device: torch.device
    small: Sizes
    large: Sizes
    exact: Sizes
    length: int
    steps: int
    exact_steps: int
    exact_bucket: int
    optimizers: tuple[str, ...] | None
    sides: tuple[int, ...]

    @property
    def is_rehearsal(self) -> bool:
        """Whether the CPU stands in for a GPU."""
        return self.device.type == "cpu"

    @property
    def trains_by(self) -> str | None:
        """The device whose kernels make training steps, as of ``using_kernels``.

        A rehearsal trains by torch's operations, because Triton's interpreter would take minutes.
        """
        return None if self.is_rehearsal else self.device.type

    def some(self, names: Sequence[Result]) -> Sequence[Result]:
        """Returns all of some names or runs; for a rehearsal, the first."""
        return names[:1] if self.is_rehearsal else names

    def release(self) -> None:
        """Gives the device the memory back that nothing uses."""
        gc.collect()
        torch.cuda.empty_cache()

    def sync(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


GPU = Setting(
    torch.device("cuda", 0),
    LLAMAS["1B"],
    LLAMAS["7B"],
    (8192, 256, 704, 8, 4, 4, False),
    length=2048,
    steps=20,
    exact_steps=10,
    exact_bucket=2**21,
    optimizers=None,
    sides=(16384, 4096),
)
TINY: Sizes = (64, 16, 24, 2, 2, 2, False)
REHEARSAL = Setting(
    torch.device("cpu"),
    TINY,
    TINY,
    TINY,
    length=8,
    steps=2,
    exact_steps=2,
    exact_bucket=1000,
    optimizers=("lomo",),
    sides=(16,),
)


def here(is_rehearsal: bool) -> Setting:
    """Returns the setting of this machine. Raises ``SystemExit`` if it has no GPU."""
    if is_rehearsal:
        return REHEARSAL
    if not torch.cuda.is_available():
        raise SystemExit(
            "There is no GPU here: torch.cuda.is_available() is False. Add --rehearse to run all "
            "stages at a tiny size on the CPU."
        )
    return GPU


@contextmanager
def using_kernels(kind: str | None) -> Iterator[None]:
    """A context in which kernels step the tensors of a kind of device; None: torch's operations.

    They are not checked before the first step, which takes seconds: the self-test's stage does.
    """
    with (
        mock.patch.object(selftest, "CHECKED", set()),
        mock.patch.object(devices, "DEVICES", set() if kind is None else {kind}),
        mock.patch.object(native_table, "is_available", lambda: False),
    ):
        yield


def separately(
    setting: Setting, function: Callable[..., Result], *args: Any, env: Mapping[str, str] = {}
) -> Result:
    """Returns ``function(*args)``, run in a process of its own, whose GPU memory is free before.

    A rehearsal calls the function in this process, because a new one takes seconds to start.

    Args:
        setting: of the stage.
        function: of a module, with arguments and results that can be pickled.
        args: of the function.
        env: environment variables of the process, set before it imports torch.
    """
    with mock.patch.dict(os.environ, env):
        if setting.is_rehearsal:
            return function(*args)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(function, *args).result()
