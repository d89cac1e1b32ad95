"""A checkpoint takes the place of the one before, in two renames; other files there stay.

FOLDER/.incomplete-TAG/             one that is being written, or was left when that failed
FOLDER/.replaced-TAG/               what stood in FOLDER/TAG, until its other files have been
                                    brought to the new one: a tokenizer, the checkpoint TAG/step1

A tag that is a symbolic link stays one: this happens beside the folder that it names.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

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


def incomplete(path: Path) -> Path:
    """Returns where a checkpoint is written before it is complete."""
    place = _place(path)
    return place.with_name(_INCOMPLETE + place.name)


def _replaced(path: Path) -> Path:
    """Where what stood in ``path`` lies while a new checkpoint takes its place."""
    place = _place(path)
    return place.with_name(_REPLACED + place.name)


def prepare(path: Path) -> None:
    """Makes the folder to write a checkpoint in, and clears up after processes that were killed.

    Raises:
        FileExistsError: if a file is in the way.
    """
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file, not a folder: choose another tag or folder.")
    aside = incomplete(path)
    aside.mkdir(parents=True, exist_ok=True)
    for left in aside.parent.glob(_INCOMPLETE + "*"):
        _clear(left)
    for left in aside.parent.glob(_REPLACED + "*"):
        _settle(left.with_name(left.name.removeprefix(_REPLACED)))
    aside.mkdir(exist_ok=True)


def discard(path: Path) -> None:
    """Removes what was written of a checkpoint that could not be completed."""
    _clear(incomplete(path))


def take_place(path: Path) -> None:
    """Moves the folder ``incomplete(path)``, whose manifest is written, to ``path``.

    A process killed in here leaves the old checkpoint or the new one, complete, where ``find``
    looks for it, and all other files in one of the two folders.
    """
    place = _place(path)
    if place.exists():
        place.rename(_replaced(path))
    incomplete(path).rename(place)
    sync(place.parent)
    _settle(place)


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
    """Yields the tags directly in ``folder``, and the folders of the checkpoints under them."""
    entries = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
    tags = {n.removeprefix(_REPLACED) for n in entries if not n.startswith(_INCOMPLETE)}
    for tag in sorted(tags):
        path = find(folder, tag)
        if path is not None and (path / MANIFEST).is_file():
            yield tag, path


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
