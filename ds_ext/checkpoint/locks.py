"""Locks between jobs that save into one folder. The kernel releases them when a process ends.

``flock`` works on local file systems. On NFS, Lustre and GPFS it also works between hosts, unless
the mount options restrict locks to one host (``nolock``, ``localflock``). Other hosts then see such
a lock as free. Another host's save therefore counts as dead only after an hour without a write.
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

NAME = ".ds_ext.lock"  # a job holds this lock while it moves or removes files
SECONDS = 60.0  # timeout for the lock; moving files takes milliseconds
STALE = 3600.0  # seconds without a write after which another host's save counts as dead


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Context in which other jobs cannot move or remove files in ``folder``.

    Raises:
        CheckpointError: another job holds the lock too long.
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
        path.unlink(missing_ok=True)  # before the release: waiting jobs create a new file
        release(file)


def hold(path: Path) -> TextIO:
    """Creates a file, and locks it until ``release`` or the end of this process."""
    file = open(path, "w+")
    if _lock(file):
        file.write(_kernel())
        file.flush()
    return file


def release(file: TextIO) -> None:
    """Unlocks a file, also for processes that were forked meanwhile."""
    with contextlib.suppress(OSError):  # locks are not supported
        fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def is_abandoned(path: Path, writes: Path, now: float) -> bool:
    """Returns whether the job that locked the file ``path`` has ended.

    Args:
        path: the lock file.
        writes: the folder that the job writes to.
        now: the file system's current time, in seconds.
    """
    try:
        with open(path, "r+") as file:
            is_known = _lock(file) and file.read() == _kernel()
    except FileNotFoundError:  # it has just ended, and removed its files
        return False
    except (BlockingIOError, PermissionError):  # it runs, or belongs to another user
        return False
    if is_known or not writes.exists():  # or killed before it wrote anything
        return True
    last = [f.stat().st_mtime for f in (path, writes, *writes.glob("*")) if f.exists()]
    return now - max(last, default=now) > STALE


def _take(path: Path) -> TextIO | None:
    """The locked file; None if another process has locked or just removed it."""
    file = open(path, "a")
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        _lock(file)
        if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            return file
    file.close()
    return None


def _lock(file: TextIO) -> bool:
    """Locks a file; returns whether locks are supported. Raises BlockingIOError if it is locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _kernel() -> str:
    """An id of the running kernel. Its processes see each other's locks on every file system."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()
