"""Replaces a checkpoint folder with a new one by two renames, and preserves other files in it.

FOLDER/.incomplete-TAG.ID/          a checkpoint in progress, or the remains of a failed save
FOLDER/.incomplete-TAG.ID.lock      locked while the job that writes the checkpoint runs
FOLDER/.ds_ext.lock                 locked while a job creates, moves or clears such folders
FOLDER/.replaced-TAG/               the old FOLDER/TAG, until its other files, such as a tokenizer
                                    or the checkpoint TAG/step1, have been moved to the new one

Several jobs may save into one folder, even with the same tag, because each save has its own ID. If
a tag is a symbolic link, these folders are next to the link's target, and the link is kept.
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
# File names of DeepSpeed's checkpoints, with any optimizer.
_FILE = re.compile(
    r"((bf16_|fp16_)?zero_pp_rank_\d+_|(layer_-?\d+_)?expert_\d+_|expp_rank_\d+_)?"
    r"mp_rank_\d+_(model|optim)_states\.pt"
)


def _resolve_link(path: Path) -> Path:
    """The target of ``path`` if it is a link, else ``path``."""
    return path.resolve() if path.is_symlink() else path


def _replaced(path: Path) -> Path:
    """The path of the old checkpoint while a new one replaces it."""
    place = _resolve_link(path)
    return place.parent / (_REPLACED + place.name)


class Draft(NamedTuple):
    """A checkpoint that is being written."""

    path: Path  # the final path, possibly a link
    place: Path  # the target of ``path``
    aside: Path  # the temporary folder
    lock: TextIO


def prepare(path: Path) -> Draft:
    """Creates the temporary folder of a checkpoint, and removes those of killed processes.

    Raises:
        FileExistsError: ``path`` is a file.
    """
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file, not a folder: choose another tag or folder.")
    place = _resolve_link(path)
    root = place.parent
    root.mkdir(parents=True, exist_ok=True)
    with locks.exclusive(root):
        aside = root / f"{_INCOMPLETE}{place.name}.{secrets.token_hex(4)}"
        draft = Draft(path, place, aside, locks.hold(_lock_of(aside)))
        aside.mkdir()
        _clear_abandoned(root, now=aside.stat().st_mtime)
        for left in root.glob(_REPLACED + "*"):
            _finish_replacement(left.with_name(left.name.removeprefix(_REPLACED)))
    return draft


def move_into_place(draft: Draft) -> None:
    """Moves a checkpoint with a manifest into place.

    If the process is killed meanwhile, ``find`` returns the complete old or new checkpoint. All
    other files are in one of the two folders.
    """
    place = draft.place
    with locks.exclusive(place.parent):
        _finish_replacement(place)  # another job may have been killed meanwhile
        if place.exists():
            place.rename(_replaced(place))
        draft.aside.rename(place)
        sync(place.parent)
        _finish_replacement(place)


def close(draft: Draft) -> None:
    """Ends a save, and removes the temporary folder if it was not moved into place."""
    shutil.rmtree(draft.aside, ignore_errors=True)  # the next save removes any remains
    _lock_of(draft.aside).unlink(missing_ok=True)
    locks.release(draft.lock)


def _lock_of(aside: Path) -> Path:
    return aside.with_name(aside.name + ".lock")


def _clear_abandoned(root: Path, now: float) -> None:
    """Removes incomplete checkpoints of jobs that have ended."""
    for name in {entry.name.removesuffix(".lock") for entry in root.glob(_INCOMPLETE + "*")}:
        aside = root / name
        if locks.is_abandoned(_lock_of(aside), aside, now):
            shutil.rmtree(aside, ignore_errors=True)
            _lock_of(aside).unlink(missing_ok=True)


def find(folder: Path, tag: str) -> Path | None:
    """Returns a checkpoint's folder, even if a killed process has left it elsewhere; or None."""
    path, parts = folder / tag, Path(tag).parts
    if _checkpoint_files(path):
        return path
    for i in range(1, len(parts) + 1):
        moved = _replaced(folder.joinpath(*parts[:i])).joinpath(*parts[i:])
        if _checkpoint_files(moved):
            return moved
    return path if path.is_dir() else None


def checkpoints(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields each tag in ``folder``, at any depth, with the folder of its checkpoint.

    Follows links, but visits no folder twice, and skips folders that contain ``folder``.
    """
    seen = {folder.resolve(), *folder.resolve().parents}
    seen_tags: set[PurePosixPath] = set()
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
            if found is not None and tag not in seen_tags and (found / MANIFEST).is_file():
                seen_tags.add(tag)
                yield str(tag), found


def _folders(path: Path) -> list[str]:
    """Names of folders and links in a folder, except incomplete checkpoints."""
    try:
        entries = [e.name for e in os.scandir(path) if e.is_dir() or e.is_symlink()]
    except OSError:  # it belongs to another user, or was just removed
        return []
    return [name for name in entries if not name.startswith(_INCOMPLETE)]


def sync(folder: Path) -> None:
    """Flushes a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finish_replacement(place: Path) -> None:
    """Completes a replacement, or restores the old folder if the new one is missing."""
    before = _replaced(place)
    if not before.is_dir():
        return
    if _checkpoint_files(place):
        _move_foreign_files(before, place)
        _clear(before)
        return
    if place.is_dir():  # the new folder was moved away and an empty one created in its place
        _move_foreign_files(place, before)
        place.rmdir()
    before.rename(place)


def _move_foreign_files(source: Path, target: Path) -> None:
    """Moves files that are not part of a checkpoint. Appends ~ to names that are taken."""
    own = _checkpoint_files(source)
    for entry in list(source.iterdir()):
        if entry.name not in own:
            goal = target / entry.name
            while goal.exists() or goal.is_symlink():
                goal = goal.with_name(goal.name + "~")
            entry.rename(goal)


def _clear(folder: Path) -> None:
    """Removes a checkpoint's files, the manifest last, and then the folder if it is empty."""
    for name in sorted(_checkpoint_files(folder), key=MANIFEST.__eq__):
        (folder / name).unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _checkpoint_files(folder: Path) -> set[str]:
    """Names of the files in ``folder`` that are part of a checkpoint."""
    if not folder.is_dir():
        return set()
    try:
        names = set(json.loads((folder / MANIFEST).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        names = set()  # the manifest is missing or damaged: match file names
    names |= {MANIFEST, MANIFEST + ".new"}
    return {
        entry.name
        for entry in folder.iterdir()
        if (entry.name in names or _FILE.fullmatch(entry.name)) and not entry.is_dir()
    }
