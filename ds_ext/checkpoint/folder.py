"""Checkpoints on disk: written aside, described by a manifest, and moved into place when complete.

FOLDER/latest                       the tag of the newest one
FOLDER/TAG/ds_ext.json              sizes and checksums of all its files
"""

import json
import os
import re
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ds_ext.checkpoint import locks, swap
from ds_ext.checkpoint.swap import MANIFEST as MANIFEST
from ds_ext.checkpoint.swap import Draft
from ds_ext.errors import CheckpointError

VERSION = 4  # of the format: manifest and contents


class Checkpoint(NamedTuple):
    """Where a checkpoint lies: ``engine.load_checkpoint(folder, tag)`` loads it."""

    folder: str
    tag: str
    steps: int  # that were taken before it was saved


def path_of(folder: str | Path, tag: object) -> Path:
    """Returns where the checkpoint ``tag`` belongs.

    Args:
        folder: what was given to engine.save_checkpoint.
        tag: a text or a number, with ``/`` for folders in it.

    Raises:
        ValueError: for a tag that is not a path inside ``folder``, or not a checkpoint's own.
    """
    parts = PurePosixPath(str(tag)).parts
    hidden = any(part == ".." or part.startswith((".incomplete-", ".replaced-")) for part in parts)
    if not parts or hidden or parts[0] == "/" or parts in (("latest",), ("zero_to_fp32.py",)):
        raise ValueError(
            f"tag={tag!r}: give the name of a folder inside {folder}, such as 'step100' or "
            "'run/step100', or leave it out."
        )
    return Path(folder, *parts)


def prepare(path: Path) -> Draft:
    """Makes a folder to write the checkpoint ``path`` in: ``aside``.

    Raises:
        CheckpointError: if a file is in the way.
    """
    try:
        return swap.prepare(path)
    except FileExistsError as error:
        raise CheckpointError(str(error)) from error


def describe(path: Path) -> dict[str, int]:
    """Returns the size in bytes and the CRC-32 of a file, once it is on the disk."""
    size, checksum = 0, 0
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        while block := file.read(2**22):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return {"bytes": size, "crc32": checksum}


def commit(draft: Draft, manifest: dict[str, Any], is_latest: bool) -> None:
    """Moves a checkpoint to where it belongs.

    A process killed in here leaves the old checkpoint or the new one, complete.

    Args:
        draft: what ``prepare`` returned.
        manifest: what it says of itself; its key "files" has what ``describe`` returned of each.
        is_latest: whether it becomes the one that is loaded without a tag.

    Raises:
        CheckpointError: if a file that a rank wrote is not there.
    """
    written = draft.aside
    for name, file in manifest["files"].items():
        if not (written / name).is_file() or (written / name).stat().st_size != file["bytes"]:
            raise CheckpointError(
                f"{name} was written by its rank but is not in {written}: the folder must lie on "
                "a file system that all ranks share."
            )
    said = manifest | {"crc32": _checksum(manifest)}
    _write(written / MANIFEST, json.dumps(said, indent=1))
    swap.take_place(draft)
    if is_latest:
        folder = draft.path.parents[len(Path(manifest["tag"]).parts) - 1]
        with locks.exclusive(folder):
            _write(folder / "latest", manifest["tag"])


def _write(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    aside = path.with_name(path.name + ".new")
    with open(aside, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    swap.sync(path.parent)


def latest(folder: Path) -> str | None:
    """Returns the tag of the checkpoint that was saved last; None if nothing was ever saved.

    Raises:
        CheckpointError: if the file that names it is empty.
    """
    file = folder / "latest"
    if not file.is_file():
        return None
    tag = file.read_text().strip()
    if not tag:
        raise CheckpointError(f"{file} is empty. {_others(folder, folder / ' ')}")
    return tag


def find(folder: Path, tag: str) -> Path:
    """Returns the folder of a checkpoint, wherever a killed process left it.

    Raises:
        CheckpointError: if there is none under this tag.
    """
    path = swap.find(folder, tag)
    if path is None:
        raise CheckpointError(f"there is no checkpoint {folder / tag}. {_others(folder, Path())}")
    return path


def manifest(path: Path) -> dict[str, Any] | None:
    """Returns what a checkpoint says of itself; None if ds_ext did not write it.

    Raises:
        CheckpointError: if the manifest is damaged, or of another version of the format.
    """
    if not (path / MANIFEST).is_file():
        return None
    try:
        return _manifest(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error} {_others(path.parent, path)}") from error


def _manifest(path: Path) -> dict[str, Any]:
    try:
        said: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        damaged = said.pop("crc32") != _checksum(said)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        damaged = True
    if damaged:
        raise CheckpointError(f"{path / MANIFEST} is damaged.")
    if said["ds_ext"] != VERSION:
        raise CheckpointError(
            f"{path} has format {said['ds_ext']} of ds_ext's checkpoints, this ds_ext reads format "
            f"{VERSION}: load it with the version that wrote it, save_16bit_model there, and go on "
            "from that model."
        )
    return said


def _checksum(said: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())


def verify(path: Path, files: dict[str, dict[str, int]], names: Iterable[str]) -> None:
    """Checks that files are what was written.

    Args:
        path: the folder of the checkpoint.
        files: what ``describe`` returned of each file when it was written.
        names: those to read.

    Raises:
        CheckpointError: for one that is missing, or has another size or checksum.
    """
    for name in names:
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing. {_others(path.parent, path)}")
        size = file.stat().st_size
        if size != files[name]["bytes"]:
            raise CheckpointError(
                f"{file} is damaged: {size} bytes of {files[name]['bytes']}. "
                f"{_others(path.parent, path)}"
            )
        if describe(file) != files[name]:
            raise CheckpointError(
                f"{file} is damaged: its checksum differs. {_others(path.parent, path)}"
            )


def _others(folder: Path, path: Path) -> str:
    """What a user can load instead of ``path``: said in an error."""
    found = [c.tag for c in _complete(folder) if folder / c.tag != path]
    if not found:
        return f"No other complete checkpoint is in {folder}."
    return f"Nothing was loaded. Complete checkpoints in {folder}: {', '.join(found[:5])}."


def newest_checkpoint(folder: str | Path) -> Checkpoint | None:
    """Returns the newest checkpoint that is complete and undamaged, to resume after a failure.

    It is read once, to verify it.

    Args:
        folder: what was given to engine.save_checkpoint, or the output_dir of HF Trainer, whose
            ``resume_from_checkpoint`` then takes the result's ``folder``.

    Returns:
        Where it lies; None if there is none.
    """
    trainers = [
        c
        for inner in Path(folder).glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-\d+", inner.name) and (inner / "trainer_state.json").is_file()
        for c in _complete(inner)
    ]
    candidates = sorted([*_complete(Path(folder)), *trainers], key=lambda c: -c.steps)
    for candidate in candidates:
        try:
            path = find(Path(candidate.folder), candidate.tag)
            files = _manifest(path)["files"]
            verify(path, files, files)
            return candidate
        except (CheckpointError, OSError):
            continue
    return None


def _complete(folder: Path) -> list[Checkpoint]:
    """Checkpoints whose files are all there, newest first; of equally new ones the latest.

    One in a folder of ``folder`` counts if it was saved under such a tag: another run that was
    saved to that folder is none of ``folder``'s.
    """
    found = []
    for tag, path in swap.checkpoints(folder):
        try:
            said = _manifest(path)
            files, depth = said["files"].items(), len(Path(tag).parts)
            is_own = depth in (1, len(PurePosixPath(said["tag"]).parts))
            if is_own and all((path / n).stat().st_size == file["bytes"] for n, file in files):
                found.append(Checkpoint(str(folder), tag, said["global_steps"]))
        except (CheckpointError, OSError):
            continue
    file = folder / "latest"
    newest = file.read_text().strip() if file.is_file() else ""
    return sorted(found, key=lambda c: (-c.steps, c.tag != newest, c.tag))
