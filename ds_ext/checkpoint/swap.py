"""A checkpoint takes the place of the one before, in two renames; other files there stay.

FOLDER/.incomplete-TAG.ID/          one that is being written, or was left when that failed
FOLDER/.incomplete-TAG.ID.lock      locked as long as the job that writes it lives
FOLDER/.ds_ext.lock                 locked while a job makes, moves or clears such folders
FOLDER/.replaced-TAG/               what stood in FOLDER/TAG, until its other files have been
                                    brought to the new one: a tokenizer, the checkpoint TAG/step1

Several jobs may save into one folder, under the same tag too: each save has an ID of its own.
A tag that is a symbolic link stays one: this happens beside the folder that it names.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TextIO

from ds_ext.checkpoint import locks

MANIFEST = "ds_ext.json"
_INCOMPLETE, _REPLACED = ".incomplete-", ".replaced-"
# What DeepSpeed's engine calls the files of a checkpoint, whichever optimizer wrote them.
_FILE = re.compile(
    r"((bf16_|fp16_)?zero_pp_rank_\d+_|(layer_-?\d+_)?expert_\d+_|expp_rank_\d+_)?"
    r"mp_rank_\d+_(model|optim)_states\.pt"
)


def _place(path: Path) -> Path:
    """The folder itself, where ``path`` is a link to it."""
    return path.resolve() if path.is_symlink() else path


def _replaced(path: Path) -> Path:
    """Where what stood in ``path`` lies while a new checkpoint takes its place."""
    place = _place(path)
    return place.parent / (_REPLACED + place.name)


class Draft(NamedTuple):
    """A checkpoint that is being written."""

    path: Path  # where it belongs, perhaps a link
    place: Path  # the folder itself
    aside: Path  # where it is written
    lock: TextIO


def prepare(path: Path) -> Draft:
    """Makes the folder to write a checkpoint in, and clears up after processes that were killed.

    Raises:
        FileExistsError: if a file is in the way.
    """
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file, not a folder: choose another tag or folder.")
    place = _place(path)
    root = place.parent
    root.mkdir(parents=True, exist_ok=True)
    with locks.exclusive(root):
        aside = root / f"{_INCOMPLETE}{place.name}.{secrets.token_hex(4)}"
        draft = Draft(path, place, aside, locks.hold(_lock_of(aside)))
        aside.mkdir()
        _clear_abandoned(root, now=aside.stat().st_mtime)
        for left in root.glob(_REPLACED + "*"):
            _settle(left.with_name(left.name.removeprefix(_REPLACED)))
    return draft


def take_place(draft: Draft) -> None:
    """Moves a checkpoint whose manifest is written to where it belongs.

    A process killed in here leaves the old checkpoint or the new one, complete, where ``find``
    looks for it, and all other files in one of the two folders.
    """
    place = draft.place
    with locks.exclusive(place.parent):
        _settle(place)  # another job may have been killed in here
        if place.exists():
            place.rename(_replaced(place))
        draft.aside.rename(place)
        sync(place.parent)
        _settle(place)


def close(draft: Draft) -> None:
    """Ends the writing of a checkpoint; removes what was written if it has not taken its place."""
    shutil.rmtree(draft.aside, ignore_errors=True)  # what stays, the next save clears
    _lock_of(draft.aside).unlink(missing_ok=True)
    locks.release(draft.lock)


def _lock_of(aside: Path) -> Path:
    return aside.with_name(aside.name + ".lock")


def _clear_abandoned(root: Path, now: float) -> None:
    """Removes what jobs that have ended left incomplete."""
    for name in {entry.name.removesuffix(".lock") for entry in root.glob(_INCOMPLETE + "*")}:
        aside = root / name
        if locks.is_abandoned(_lock_of(aside), aside, now):
            shutil.rmtree(aside, ignore_errors=True)
            _lock_of(aside).unlink(missing_ok=True)


def find(folder: Path, tag: str) -> Path | None:
    """Returns the folder of a checkpoint, wherever a killed process left it; None without one."""
    path, parts = folder / tag, Path(tag).parts
    if _checkpoint_files(path):
        return path
    for i in range(1, len(parts) + 1):
        moved = _replaced(folder.joinpath(*parts[:i])).joinpath(*parts[i:])
        if _checkpoint_files(moved):
            return moved
    return path if path.is_dir() else None


def checkpoints(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields the tags in ``folder``, at any depth, and the folders of the checkpoints under them.

    Links are followed, but to no folder twice, and to none that ``folder`` lies in.
    """
    seen = {folder.resolve(), *folder.resolve().parents}
    told: set[PurePosixPath] = set()
    waiting = [(PurePosixPath(), folder)]
    while waiting:
        above, path = waiting.pop()
        for name in _folders(path):
            tag = above / name.removeprefix(_REPLACED)
            found = find(folder, str(tag))
            for inner in filter(None, (path / name, found)):
                if inner.is_dir() and inner.resolve() not in seen:
                    seen.add(inner.resolve())
                    waiting.append((tag, inner))
            if found is not None and tag not in told and (found / MANIFEST).is_file():
                told.add(tag)
                yield str(tag), found


def _folders(path: Path) -> list[str]:
    """Names of folders and links in a folder, but for incomplete checkpoints."""
    try:
        entries = [e.name for e in os.scandir(path) if e.is_dir() or e.is_symlink()]
    except OSError:  # another user's, or gone meanwhile
        return []
    return [name for name in entries if not name.startswith(_INCOMPLETE)]


def sync(folder: Path) -> None:
    """Returns when the entries of a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _settle(place: Path) -> None:
    """Ends an exchange of folders, or undoes it where the new one has not come."""
    before = _replaced(place)
    if not before.is_dir():
        return
    if _checkpoint_files(place):
        _bring_others(before, place)
        _clear(before)
        return
    if place.is_dir():  # someone has made it anew
        _bring_others(place, before)
        place.rmdir()
    before.rename(place)


def _bring_others(source: Path, target: Path) -> None:
    """Moves what no checkpoint wrote; next to a namesake, under its name with a ~."""
    own = _checkpoint_files(source)
    for entry in list(source.iterdir()):
        if entry.name not in own:
            goal = target / entry.name
            while goal.exists() or goal.is_symlink():
                goal = goal.with_name(goal.name + "~")
            entry.rename(goal)


def _clear(folder: Path) -> None:
    """Removes the files of a checkpoint, its manifest last, and the folder if it is empty then."""
    for name in sorted(_checkpoint_files(folder), key=MANIFEST.__eq__):
        (folder / name).unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _checkpoint_files(folder: Path) -> set[str]:
    """Names of the files in ``folder`` that a checkpoint wrote."""
    if not folder.is_dir():
        return set()
    try:
        told = set(json.loads((folder / MANIFEST).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        told = set()  # none, or damaged: names have to tell
    told |= {MANIFEST, MANIFEST + ".new"}
    return {
        entry.name
        for entry in folder.iterdir()
        if (entry.name in told or _FILE.fullmatch(entry.name)) and not entry.is_dir()
    }
