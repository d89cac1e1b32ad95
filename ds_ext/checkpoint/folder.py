"""Checkpoints on disk: files in a temporary folder, which one rename completes.

FOLDER/.incomplete-TAG.ID/  a checkpoint in progress, or the remains of a killed save
FOLDER/.ds_ext.lock         locked (``flock``) while a job moves or removes files
FOLDER/TAG/.complete/       a complete checkpoint, while its files replace those of FOLDER/TAG
FOLDER/TAG/ds_ext.json      the manifest: sizes and checksums of all files
FOLDER/latest               the tag of the newest checkpoint

A checkpoint whose tag is new is complete once its folder is renamed. If FOLDER/TAG exists, the new
folder becomes FOLDER/TAG/.complete, and its files move from there. A killed job leaves the others
in .complete, where readers look first, and the next save in FOLDER moves them. Other files in
FOLDER/TAG, such as a tokenizer or the checkpoint TAG/step1, stay where they are. A save removes
temporary folders to which no job has written for a while.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TextIO

from ds_ext.checkpoint import manifests
from ds_ext.checkpoint.manifests import COMPLETE, INCOMPLETE, MANIFEST
from ds_ext.errors import CheckpointError

LOCK = ".ds_ext.lock"
SECONDS = 60.0  # timeout for the lock; moving files takes milliseconds
STALE = 1800.0  # seconds without a write after which a save counts as killed
# File names of DeepSpeed's checkpoints, with any optimizer.
_FILE = re.compile(
    r"((bf16_|fp16_)?zero_pp_rank_\d+_|(layer_-?\d+_)?expert_\d+_|expp_rank_\d+_)?"
    r"mp_rank_\d+_(model|optim)_states\.pt"
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
    with exclusive(place.parent):
        aside = place.with_name(f"{INCOMPLETE}{place.name}.{secrets.token_hex(4)}")
        aside.mkdir()
        for new in place.parent.glob("*/" + COMPLETE):
            _finish_killed(new.parent)
        now = aside.stat().st_mtime  # by the clock of the file system
        for other in place.parent.glob(INCOMPLETE + "*"):
            with contextlib.suppress(FileNotFoundError):  # its job has just ended
                if now - max(f.stat().st_mtime for f in (other, *other.glob("*"))) > STALE:
                    shutil.rmtree(other, ignore_errors=True)
    return Draft(path, place, aside)


def close(draft: Draft) -> None:
    """Ends a save, and removes the temporary folder if ``commit`` has not moved it."""
    shutil.rmtree(draft.aside, ignore_errors=True)


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Context in which other jobs cannot move or remove files in ``folder``.

    The kernel releases the lock when a process ends. Without locks, as on some network file
    systems, the context does not keep others out.

    Raises:
        CheckpointError: another job holds the lock too long.
    """
    path, until = folder / LOCK, time.monotonic() + SECONDS
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
        file.close()


def _take(path: Path) -> TextIO | None:
    """The locked file; None if another process has locked or just removed it."""
    file, is_free = open(path, "a"), True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # any other error: locks are not supported
        is_free = not isinstance(error, BlockingIOError)
    with contextlib.suppress(FileNotFoundError):
        if is_free and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            return file
    file.close()
    return None


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
    with exclusive(place.parent):
        _finish_killed(place)  # another job may have been killed meanwhile
        if (place / COMPLETE).is_dir() and any((place / COMPLETE).iterdir()):
            raise CheckpointError(
                f"{path / COMPLETE} is no checkpoint of ds_ext, or other files are newer: move it."
            )
        aside.rename(place / COMPLETE if place.exists() else place)
        _sync(place if (place / COMPLETE).exists() else place.parent)
        _finish(place)
    if is_latest:
        folder = path.parents[len(Path(manifest["tag"]).parts) - 1]
        with exclusive(folder):
            _write(folder / "latest", manifest["tag"])


def _finish_killed(place: Path) -> None:
    """Does what a killed job has not, unless another program has saved there since."""
    if manifests.later_file(place) is None:
        _finish(place)


def _finish(place: Path) -> None:
    """Moves the files of a complete checkpoint into its folder, in place of the old files.

    At no time do files of both checkpoints lie there, which DeepSpeed's tools would mix. A model is
    moved after the states, and the manifest last.
    """
    new = place / COMPLETE
    if not (new / MANIFEST).is_file():
        return
    left = {entry.name for entry in new.iterdir()}
    try:
        moved = manifests.read(new)["files"].keys() - left
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} A save was killed while it moved files from {new}: delete that folder to "
            "keep what lies beside it."
        ) from None
    for name in _own_files(place) - moved:
        (place / name).unlink()
    for name in sorted(left, key=lambda name: (name == MANIFEST, "model_states" in name)):
        (new / name).replace(place / name)
    _sync(place)
    new.rmdir()


def _own_files(place: Path) -> set[str]:
    """Names of the files in a folder that are part of a checkpoint, except the manifest."""
    try:
        names = set(json.loads((place / MANIFEST).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        names = set()  # the manifest is missing or damaged: match file names
    files = {entry.name for entry in place.iterdir() if not entry.is_dir()}
    return {name for name in files if name in names or _FILE.fullmatch(name)}


def _write(path: Path, text: str) -> None:
    """Writes a file atomically."""
    aside = path.with_name(path.name + ".new")
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
