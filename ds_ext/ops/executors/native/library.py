"""Builds and loads the C++ library, once per machine, at its first use.

Without it, the reference executor makes the passes, and one line in the log says so. A file in the
cache folder ends with the SHA-256 hash of its other bytes. It is read if the hash is right and
nobody but this user or root can write to it: loading a library that was cut short ends the process
with SIGBUS. Results of self-tests are kept in the same way.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from ds_ext.logs import logger
from ds_ext.ops import schema

SOURCE = Path(__file__).with_name("passes.cpp")
FLAGS = (
    "-O3 -std=c++17 -fPIC -shared -pthread -fvisibility=hidden "
    # None of these changes a result: no fused multiply-add, no reordered sums.
    "-fno-math-errno -fno-trapping-math -ffp-contract=off"
).split()
SWITCH = "DS_EXT_NATIVE"  # environment variable: 0 selects the reference executor
SECONDS = 300  # timeout of the compiler
HASH_BYTES = 32
PROCESS = os.getpid()  # passes of processes that are forked from it use one thread


@functools.cache
def load() -> ctypes.CDLL | None:
    """Returns the library, building it if needed; None if it is disabled or cannot be built."""
    if os.environ.get(SWITCH, "1") == "0":
        return None
    try:
        library = ctypes.CDLL(str(_built()))
        ctypes.c_int.in_dll(library, "process_with_threads").value = PROCESS
    except Exception as error:  # of a compiler, a disk or a loader: training goes on without it
        logger.info(
            "native CPU code is not available, so PyTorch operations step on the CPU: %s", error
        )
        return None
    library.passes_entry_bytes.restype = ctypes.c_int64
    library.passes_run.restype = None
    library.passes_run.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_int64, *[ctypes.c_int] * 2]
    return library


def cache_folder() -> Path:
    """Returns the folder of kept files: ``XDG_CACHE_HOME``/ds_ext, or ~/.cache/ds_ext.

    Raises:
        RuntimeError: if this user has no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_ext"


def _built() -> Path:
    """The path of the built library. Raises OSError or SubprocessError if the build fails."""
    names = os.environ.get("CXX", ""), "g++", "c++", "clang++"
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise OSError("there is no C++ compiler (g++, c++ or $CXX)")
    source = schema.header(), SOURCE.read_text("utf-8")
    key = [*source, *FLAGS, platform.machine(), platform.libc_ver()[1], compiler]
    name = f"passes-{hashlib.sha256(chr(0).join(key).encode()).hexdigest()[:16]}.so"
    path, own = cache_file(name)
    if own is not None:
        # Other processes may build it at the same time: the last one replaces the file.
        with own:
            _build(compiler, Path(own.name) / name).replace(path)
    return path


def cache_file(name: str) -> tuple[Path, tempfile.TemporaryDirectory[str] | None]:
    """Returns the path of a file that others cannot write to.

    If the file is missing or damaged, also a folder to make it in: ``seal`` it there, then replace
    the path by it.
    """
    with contextlib.suppress(OSError, RuntimeError):  # no home folder, or not writable
        for folder in (cache_folder(), cache_folder() / f"user-{os.getuid()}"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_safe(folder):
                path = folder / name
                return path, None if _is_whole(path) else tempfile.TemporaryDirectory(dir=folder)
    new = Path(tempfile.mkdtemp(prefix="ds_ext-"))
    return new / name, tempfile.TemporaryDirectory(dir=new)


def _is_safe(path: Path) -> bool:
    """Whether only this user or root can write to a file or folder."""
    found = path.stat()
    return found.st_uid in (os.getuid(), 0) and not found.st_mode & 0o022


def _is_whole(path: Path) -> bool:
    """Whether a file is there, is complete, and only this user or root can write to it."""
    if not path.exists() or not _is_safe(path):
        return False
    content = path.read_bytes()
    return content[-HASH_BYTES:] == hashlib.sha256(content[:-HASH_BYTES]).digest()


def _build(compiler: str, path: Path) -> Path:
    """Builds the library, followed by its hash, and waits until it is on disk."""
    path.with_name("schema.h").write_text(schema.header(), "utf-8")
    command = [compiler, *FLAGS, f"-I{path.parent}", "-o", str(path), str(SOURCE)]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=SECONDS
    )
    if done.returncode:
        raise OSError(f"{compiler} cannot build {SOURCE.name}: {done.stderr.strip()[:500]}")
    path.chmod(0o755)
    return seal(path)


def seal(path: Path) -> Path:
    """Appends the hash of a file, and waits until it is on disk."""
    content = path.read_bytes()
    with path.open("ab") as file:
        file.write(hashlib.sha256(content).digest())
        file.flush()
        os.fsync(file.fileno())
    return path
