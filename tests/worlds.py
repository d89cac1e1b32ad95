"""Jobs on real ranks: worlds of processes over gloo that stay alive from one test to the next.

A job is a function of a module, called on every rank; its arguments and results can be pickled:

    worlds.run(2, job, *args)    # -> the ranks' results; AssertionError if one fails, dies or hangs
    worlds.once(2, job, *args)   # the same, but run only once a session: several tests look at it
    worlds.fresh(2, job, *args)  # new processes -> how each ended: for jobs that kill ranks

A test that every rank runs as a whole is its own job: ``@worlds.on(2)``.

Ranks are forked from one process that has imported everything (tests/rank.py), so that a world
starts in a few tenths of a second. What a job leaves behind is cleared away after it. A world
whose job failed is killed, and the next job gets a new one.
"""

import atexit
import contextlib
import functools
import inspect
import io
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
OLDER = [os.environ["DS_EXT_TEST_PACKAGES"]] if "DS_EXT_TEST_PACKAGES" in os.environ else []
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    # Other versions of packages come first: see integration/test_versions.py.
    "PYTHONPATH": os.pathsep.join([*OLDER, str(ROOT)]),
}
TIMEOUT = 30.0  # seconds that a collective of a living world waits
WORN = 24  # threads of a rank
GRACE = 3.0  # seconds in which the other ranks may tell what they know of a failure
TOLD = 4000  # characters of a rank's output that are shown

_context = multiprocessing.get_context("forkserver")
_worlds: dict[int, "World"] = {}
_found: dict[tuple[int, str, bytes], Any] = {}


def run(size: int, job: Callable[..., Any], *args: Any, limit: float = 120) -> list[Any]:
    """Runs ``job(*args)``, both pickled, on each of ``size`` ranks -> what it returned, by rank.

    AssertionError, with tracebacks and output of all, if a rank raised, died, or was late: after
    ``limit`` seconds the world is killed.
    """
    world = _worlds.pop(size, None)
    if world is None or not world.is_alive():
        world = World(size, TIMEOUT)
    try:
        found = world.run(job, args, limit)
    except BaseException:
        world.kill()
        raise
    _keep(size, world)
    return found


def _keep(size: int, world: "World") -> None:
    """Keeps a world for the next job, and no others than the last two; or ends it if it is worn.

    Each process group that a job has left behind keeps a thread of gloo's, which wakes up a hundred
    times a second: ranks that wait for jobs would take all of a small machine.
    """
    if world.threads() > WORN:
        world.kill()
        return
    _worlds[size] = world
    while len(_worlds) > 2:
        _worlds.pop(next(iter(_worlds))).kill()


def once(size: int, job: Callable[..., Any], *args: Any, limit: float = 120) -> list[Any]:
    """What ``run`` returns or raises, kept for the next call with the same arguments."""
    key = size, _name(job), pickle.dumps(args)
    if key not in _found:
        try:
            _found[key] = run(size, job, *args, limit=limit)
        except AssertionError as error:
            _found[key] = error
    if isinstance(_found[key], AssertionError):
        raise AssertionError(*_found[key].args)
    return _found[key]


def on(size: int, limit: float = 120) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function of a module a test that each of ``size`` ranks runs, as ``run`` does."""

    def decorate(job: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(job)
        def test(**given: Any) -> None:
            run(size, job, *inspect.signature(job).bind(**given).args, limit=limit)

        test.job = job  # type: ignore[attr-defined]  # what ranks find by the test's name
        return test

    return decorate


@dataclass
class Ended:
    """How a rank of ``fresh`` ended."""

    code: int  # exit status; negative: the signal that killed it
    seconds: float  # since the job began
    output: str
    result: Any  # what the job returned, or None


def fresh(
    size: int, job: Callable[..., Any], *args: Any, timeout: float = 20, limit: float = 300
) -> list[Ended]:
    """Runs a job, which may end its process, on new ranks -> how each ended; code 1 if it raised.

    A collective waits ``timeout`` seconds. After ``limit`` seconds ranks are killed: code -9.
    """
    return begin(size, job, *args, timeout=timeout).end(limit)


def begin(size: int, job: Callable[..., Any], *args: Any, timeout: float = 20) -> "World":
    """The same, but does not wait: the world's ``end`` does."""
    world = World(size, timeout)
    world.began = time.monotonic()
    world.send(job, args, is_last=True)
    return world


class World:
    """So many ranks in one process group, waiting for jobs."""

    def __init__(self, size: int, timeout: float) -> None:
        start()
        self.began = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="world"))
        self.connections: list[Connection] = []
        self.processes: list[BaseProcess] = []
        port = free_port()
        for rank in range(size):
            ours, theirs = _context.Pipe()
            given = (rank, size, port, timeout, str(self.output(rank)), theirs)
            process = _context.Process(target=_serve, args=given)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def threads(self) -> int:
        """Threads of the first rank."""
        tasks = Path(f"/proc/{self.processes[0].pid}/task")
        return len(list(tasks.iterdir())) if tasks.exists() else 0

    def output(self, rank: int) -> Path:
        """The file of what a rank writes."""
        return self.folder / f"{rank}.txt"

    def told(self, rank: int) -> str:
        """The end of what a rank wrote."""
        path = self.output(rank)
        return path.read_text(errors="replace")[-TOLD:] if path.exists() else ""

    def is_alive(self) -> bool:
        """Whether all ranks are there."""
        return all(process.is_alive() for process in self.processes)

    def send(self, job: Callable[..., Any], args: tuple[Any, ...], is_last: bool = False) -> None:
        """Gives all ranks a job; after the last they end."""
        sent = sys.path, _name(job), pickle.dumps(args), is_last
        for connection in self.connections:
            with contextlib.suppress(OSError):  # it has ended: seen when its answer is waited for
                connection.send(sent)

    def run(self, job: Callable[..., Any], args: tuple[Any, ...], limit: float) -> list[Any]:
        """Runs a job -> its results by rank; AssertionError as for ``run`` above."""
        self.send(job, args)
        answers = self._answers(limit)
        if all(rank in answers and answers[rank][0] for rank in range(len(self.processes))):
            return [_loaded(answers[rank][1]) for rank in range(len(self.processes))]
        reports = [self._report(rank, answers.get(rank), limit) for rank in range(len(self))]
        raise AssertionError(f"{_name(job)} on {len(self)} ranks\n" + "\n".join(reports))

    def __len__(self) -> int:
        return len(self.processes)

    def _answers(self, limit: float) -> dict[int, tuple[bool, Any]]:
        """What the ranks answer in time, by rank; soon after a failure no more is waited for."""
        until = time.monotonic() + limit
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = dict(enumerate(self.connections))
        while waiting and (left := until - time.monotonic()) > 0:
            wait(list(waiting.values()), left)
            for rank, connection in list(waiting.items()):
                if not connection.poll():
                    continue
                del waiting[rank]
                try:
                    answers[rank] = self.connections[rank].recv()
                except (EOFError, OSError):  # it died, and is soon known to have
                    self.processes[rank].join(GRACE)
                if rank not in answers or not answers[rank][0]:
                    until = min(until, time.monotonic() + GRACE)
        return answers

    def _report(self, rank: int, answer: tuple[bool, Any] | None, limit: float) -> str:
        """How a rank fared in a job that failed."""
        if answer is not None and answer[0]:
            return f"rank {rank} ended well"
        process = self.processes[rank]
        if answer is not None:  # the traceback is the end of its output
            how = "raised"
        elif process.is_alive():
            os.kill(process.pid or 0, signal.SIGUSR1)
            time.sleep(0.2)  # it writes its stack
            how = f"had not ended after {limit:g} s, or {GRACE:g} s after another; its stack:"
        else:
            process.join(GRACE)
            how = f"died with exit status {process.exitcode}"
        return f"rank {rank} {how}\n{self.told(rank)}"

    def end(self, limit: float) -> list[Ended]:
        """Waits for the ranks' last job -> how they ended; kills those that are late."""
        try:
            return self._ended(limit)
        finally:
            self.kill()

    def _ended(self, limit: float) -> list[Ended]:
        results: dict[int, Any] = {}
        ended: dict[int, float] = {}
        reading = dict(enumerate(self.connections))
        while len(ended) < len(self):
            left = self.began + limit - time.monotonic()
            if left <= 0:
                for process in self.processes:
                    process.kill()
            alive = {r: p.sentinel for r, p in enumerate(self.processes) if r not in ended}
            wait([*alive.values(), *reading.values()], max(left, 1.0))
            for rank, connection in list(reading.items()):
                if connection.poll():
                    try:
                        is_well, result = self.connections[rank].recv()
                        if is_well:  # else a failure, perhaps after the result was sent
                            results[rank] = _loaded(result)
                    except (EOFError, OSError):
                        del reading[rank]
            for rank in alive:
                if not self.processes[rank].is_alive() and rank not in reading:
                    ended[rank] = time.monotonic() - self.began
        return [
            Ended(p.exitcode or 0, ended[r], self.told(r), results.get(r))
            for r, p in enumerate(self.processes)
        ]

    def kill(self) -> None:
        """Ends all ranks at once, and forgets what they wrote."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def start() -> None:
    """Starts the process that ranks are forked from, if it does not run yet; does not wait."""
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        _context.set_forkserver_preload(["tests.rank"])
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


@atexit.register
def close() -> None:
    """Ends all living worlds."""
    while _worlds:
        _worlds.popitem()[1].kill()


def _serve(*given: Any) -> None:
    from tests import rank  # imported already where this runs, and not to be where tests do

    rank.serve(*given)


def _name(job: Callable[..., Any]) -> str:
    if "<" in job.__qualname__:
        raise ValueError(f"{job.__qualname__} is not a function of a module")
    return f"{job.__module__}:{job.__qualname__}"


def _loaded(saved: bytes) -> Any:
    return torch.load(io.BytesIO(saved), weights_only=False)


def free_port() -> int:
    """A port that nobody listens at, below those that the kernel gives to connections."""
    while True:
        port = random.SystemRandom().randrange(10000, 30000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
