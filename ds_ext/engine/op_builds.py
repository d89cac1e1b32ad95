"""DeepSpeed's own operations, which it builds at their first use: what takes long is announced."""

import os
from pathlib import Path

from torch.utils import cpp_extension

from ds_ext.engine.log import log, warn


def announce(name: str) -> None:
    """Says that an op will be built, or that torch will wait for a build that has ended.

    Before 2.15 torch locks a build by a file (``FileBaton``). A killed build leaves it behind, and
    every run after it waits for ever, without a word. Newer versions lock the file itself
    (``FileLock``): every build leaves it behind, and nobody waits for it.

    Args:
        name: of the op.
    """
    folder = Path(cpp_extension._get_build_directory(name, False))
    lock = folder / "lock"
    waits = hasattr(cpp_extension, "FileBaton") and lock.exists()
    if waits and not _is_open(lock):
        warn(
            f"DeepSpeed's op {name} waits for a build that no process of this machine is at, such "
            f"as one that was killed: if none on another machine is, delete {lock}"
        )
    elif not (folder / f"{name}.so").exists():
        log(f"DeepSpeed builds its op {name}, once for this machine: it may take minutes")


def _is_open(path: Path) -> bool:
    """Whether a process of this machine, of which we may know, has a file open."""
    file = os.path.realpath(path)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.path.realpath(fd) == file for fd in (process / "fd").iterdir()):
                return True
        except OSError:  # it has ended, or is another user's
            continue
    return not path.exists()  # it was released meanwhile
