"""Locks between jobs that save into one folder. The kernel frees them when a process ends.

``flock`` works on local file systems, and between hosts on NFS, Lustre and GPFS unless they were
mounted without locks that reach other hosts (``nolock``, ``localflock``). There a lock looks free
to other hosts, so a free lock of another host counts only once nobody has written for an hour.
"""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from ds_ext.errors import CheckpointError

NAME = ".ds_ext.lock"  # of the lock that a job holds while it moves folders
SECONDS = 60.0  # to wait for it; moving folders takes milliseconds
STALE = 3600.0  # seconds without a write after which the save of another host counts as dead


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keeps other jobs from moving folders in ``folder`` meanwhile.

    Raises:
        CheckpointError: if another job does not finish in time.
    """
    path, until = folder / NAME, time.monotonic() + SECONDS
    while (file := _take(path)) is None:
        if time.monotonic() > until:
            raise CheckpointError(
                f"another process has held {path} for {SECONDS:.0f} s: end that process, or save "
                "into another folder."
            )
        time.sleep(0.005)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # first: who waits for this file then makes a new one
        release(file)


def hold(path: Path) -> TextIO:
    """Makes a file and locks it until ``release`` or the end of this process."""
    file = open(path, "w+")
    file.write(_kernel())
    file.flush()
    if not _lock(file):
        file.truncate(0)  # no locks here: only the time of the last write can tell
    return file


def release(file: TextIO) -> None:
    """Unlocks a file, also for processes that were forked meanwhile."""
    with contextlib.suppress(OSError):  # there are no locks
        fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def is_abandoned(path: Path, writes: Path, now: float) -> bool:
    """Returns whether the job that locked a file has ended.

    Args:
        path: of the lock; a file that is missing is one that nobody has locked.
        writes: the folder that the job writes.
        now: by the clock of the file system, in seconds.
    """
    try:
        with open(path, "r+") as file:
            kernel = file.read() if _lock(file) else ""
    except FileNotFoundError:
        kernel = ""
    except (BlockingIOError, PermissionError):  # it lives, or is another user's
        return False
    if kernel == _kernel() or not writes.exists():  # or it was killed before it wrote anything
        return True
    last = [f.stat().st_mtime for f in (path, writes, *writes.glob("*")) if f.exists()]
    return now - max(last, default=0.0) > STALE


def _take(path: Path) -> TextIO | None:
    """The file, locked; None if another process has it, or has just removed it."""
    file = open(path, "a")
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        _lock(file)
        if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            return file
    file.close()
    return None


def _lock(file: TextIO) -> bool:
    """Locks a file -> whether there are locks here. Raises BlockingIOError if it is locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _kernel() -> str:
    """Names the running kernel: its processes see each other's locks on every file system."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()
