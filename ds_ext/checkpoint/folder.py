"""Checkpoints on disk: files in a temporary folder, which one rename completes.

FOLDER/.incomplete-TAG.ID/  a checkpoint in progress, or the remains of a killed save
FOLDER/TAG/.complete/       a complete checkpoint, while its files replace those of FOLDER/TAG
FOLDER/TAG/ds_ext.json      the manifest: sizes and checksums of all files
FOLDER/latest               the tag of the newest checkpoint

A checkpoint whose tag is new is complete once its folder is renamed. If FOLDER/TAG exists, the new
folder becomes FOLDER/TAG/.complete, and its files move from there. A killed job leaves the others
in .complete, where readers look first, and the next save under TAG moves them. Other files in
FOLDER/TAG, such as a tokenizer or the checkpoint TAG/step1, stay where they are. A save removes
temporary folders to which no job has written for a while. A job that moves files locks the folder
around TAG (``flock``).
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ds_ext.checkpoint import manifests
from ds_ext.checkpoint.manifests import COMPLETE, INCOMPLETE, MANIFEST
from ds_ext.errors import CheckpointError

SECONDS = 60.0  # time limit for the lock; moving files takes milliseconds
STALE = 1800.0  # seconds without a write after which a save counts as killed
# File names of DeepSpeed's checkpoints, with any optimizer.
_FILE = re.compile(
    r"(((bf16_|fp16_)?zero_pp_rank_\d+_|(layer_-?\d+_)?expert_\d+_|expp_rank_\d+_)?mp_rank_\d+_"
    r"|layer_\d+-(.*-)?)(model|optim)_states\.pt"
)


def checkpoint_path(folder: str | Path, tag: object) -> Path:
    """Returns the path of the checkpoint ``tag``.

    Args:
        folder: the ``save_dir`` of engine.save_checkpoint.
        tag: a string or a number; ``/`` separates folders.

    Raises:
        ValueError: the tag is not a path inside ``folder``, or is a reserved name.
    """
    parts = PurePosixPath(str(tag)).parts
    hidden = any(part == ".." or part.startswith((INCOMPLETE, COMPLETE)) for part in parts)
    if not parts or hidden or parts[0] == "/" or parts in (("latest",), ("zero_to_fp32.py",)):
        raise ValueError(
            f"tag={tag!r}: give the name of a folder inside {folder}, such as 'step100' or "
            "'run/step100', or leave it out."
        )
    return Path(folder, *parts)


class Draft(NamedTuple):
    """A checkpoint that is being written."""

    path: Path  # the final path
    place: Path  # the target of ``path`` if it is a link, else ``path``
    aside: Path  # the temporary folder


def prepare(path: Path) -> Draft:
    """Creates the temporary folder of a checkpoint, and removes those of killed jobs.

    Raises:
        CheckpointError: ``path`` is a file.
    """
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file, not a folder: choose another tag or folder.")
    place = path.resolve() if path.is_symlink() else path
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = place.with_name(f"{INCOMPLETE}{place.name}.{secrets.token_hex(4)}")
    aside.mkdir()
    now = aside.stat().st_mtime  # by the clock of the file system
    for other in place.parent.glob(INCOMPLETE + "*"):
        with contextlib.suppress(FileNotFoundError):  # its job has just ended
            if now - max(f.stat().st_mtime for f in (other, *other.glob("*"))) > STALE:
                shutil.rmtree(other, ignore_errors=True)
    return Draft(path, place, aside)


def commit(draft: Draft, manifest: dict[str, Any], is_latest: bool) -> None:
    """Moves a checkpoint into place.

    If the process is killed meanwhile, either the old or the new checkpoint is complete.

    Args:
        draft: the result of ``prepare``.
        manifest: the manifest. Its key "files" has each file's ``size_and_checksum`` by its name.
        is_latest: whether loading without a tag loads this checkpoint.

    Raises:
        CheckpointError: a file that a rank wrote is missing, or a folder has its name.
    """
    path, place, aside = draft
    for name in (MANIFEST, *manifest["files"]):
        if (place / name).is_dir():
            raise CheckpointError(f"{path / name} is a folder, but a file needs its name: move it.")
    for name, file in manifest["files"].items():
        if not (aside / name).is_file() or (aside / name).stat().st_size != file["bytes"]:
            raise CheckpointError(
                f"{name} was written by its rank but is not in {aside}: the folder must lie on "
                "a file system that all ranks share."
            )
    _write(aside / MANIFEST, manifests.text(manifest))
    with locked(place.parent):
        _finish(place)  # a save under this tag may have been killed
        aside.rename(place / COMPLETE if place.exists() else place)
        _sync(place if (place / COMPLETE).exists() else place.parent)
        _finish(place)
    if is_latest:
        folder = path.parents[len(Path(manifest["tag"]).parts) - 1]
        _write(folder / "latest", manifest["tag"])


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context in which no other job moves files in ``folder``. CheckpointError if one hangs there.

    The kernel ends the lock with its process. Network file systems may have none.
    """
    opened, until = os.open(folder, os.O_RDONLY), time.monotonic() + SECONDS
    try:
        while True:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CheckpointError(
                        f"another process has moved files in {folder} for {SECONDS:.0f} s: end it, "
                        "or save into another folder."
                    ) from None
                time.sleep(0.005)
            except OSError:  # locks are not supported
                break
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_UN)  # also of processes that were forked meanwhile
        os.close(opened)


def _finish(place: Path) -> None:
    """Moves the files of a complete checkpoint into its folder, in place of the old files.

    At no time do files of both checkpoints lie there, which DeepSpeed's tools would mix. A model is
    moved after the states, and the manifest last.
    """
    new = place / COMPLETE
    if not (new / MANIFEST).is_file():
        return
    left = {entry.name for entry in new.iterdir()}
    moved = manifests.read(new)["files"].keys() - left
    for old in list(place.iterdir()):
        if _FILE.fullmatch(old.name) and old.name not in moved and not old.is_dir():
            old.unlink()
    for name in sorted(left, key=lambda name: (name == MANIFEST, "model_states" in name)):
        (new / name).replace(place / name)
    _sync(place)
    new.rmdir()


def _write(path: Path, text: str) -> None:
    """Writes a file atomically."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with open(aside, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Flushes a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
