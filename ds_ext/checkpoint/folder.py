"""Checkpoints on disk: writes a temporary folder with a manifest, and moves it into place.

FOLDER/latest                       the tag of the newest checkpoint
FOLDER/TAG/ds_ext.json              the manifest: sizes and checksums of all files
"""

import json
import os
import re
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from ds_ext.checkpoint import locks, swap
from ds_ext.checkpoint.swap import MANIFEST as MANIFEST
from ds_ext.checkpoint.swap import Draft
from ds_ext.errors import CheckpointError

VERSION = 4  # format version of manifest and contents; 0.1.0 writes 4


class FileEntry(TypedDict):
    """The size and checksum of a file."""

    bytes: int
    crc32: int


class Manifest(TypedDict):
    """The entries of a manifest that loading reads."""

    tag: str
    global_steps: int
    files: dict[str, FileEntry]
    model_files: list[str]
    state_files: list[str]
    layer_files: NotRequired[list[str]]
    tensor_parallel: NotRequired[int]


_MANIFEST = TypeAdapter(Manifest)


class Checkpoint(NamedTuple):
    """The location of a checkpoint: ``engine.load_checkpoint(folder, tag)`` loads it."""

    folder: str
    tag: str
    steps: int  # the number of steps before the save


def checkpoint_path(folder: str | Path, tag: object) -> Path:
    """Returns the path of the checkpoint ``tag``.

    Args:
        folder: the ``save_dir`` of engine.save_checkpoint.
        tag: a string or a number; ``/`` separates folders.

    Raises:
        ValueError: the tag is not a path inside ``folder``, or is a reserved name.
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
    """Creates a temporary folder, ``Draft.aside``, for the files of the checkpoint ``path``.

    Raises:
        CheckpointError: ``path`` is a file.
    """
    try:
        return swap.prepare(path)
    except FileExistsError as error:
        raise CheckpointError(str(error)) from error


def size_and_checksum(path: Path) -> dict[str, int]:
    """Flushes a file to disk; returns its size in bytes and its CRC-32."""
    size, checksum = 0, 0
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        while block := file.read(2**22):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return {"bytes": size, "crc32": checksum}


def commit(draft: Draft, manifest: dict[str, Any], is_latest: bool) -> None:
    """Moves a checkpoint into place.

    If the process is killed meanwhile, either the old or the new checkpoint is complete.

    Args:
        draft: the result of ``prepare``.
        manifest: the manifest. Its key "files" has each file's ``size_and_checksum`` by its name.
        is_latest: whether loading without a tag loads this checkpoint.

    Raises:
        CheckpointError: a file that a rank wrote is missing.
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
    swap.move_into_place(draft)
    if is_latest:
        folder = draft.path.parents[len(Path(manifest["tag"]).parts) - 1]
        with locks.exclusive(folder):
            _write(folder / "latest", manifest["tag"])


def _write(path: Path, text: str) -> None:
    """Writes a file atomically."""
    aside = path.with_name(path.name + ".new")
    with open(aside, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    swap.sync(path.parent)


def latest(folder: Path) -> str | None:
    """Returns the tag of the newest checkpoint; None if nothing was ever saved.

    Raises:
        CheckpointError: the file ``latest`` is empty.
    """
    tag = _latest_or_none(folder)
    if tag is None and (folder / "latest").is_file():
        raise CheckpointError(f"{folder / 'latest'} is empty. {_others(folder, folder / ' ')}")
    return tag


def find(folder: Path, tag: str) -> Path:
    """Returns the folder of a checkpoint, even if a killed process has left it elsewhere.

    Raises:
        CheckpointError: there is no checkpoint with this tag.
    """
    path = swap.find(folder, tag)
    if path is None:
        raise CheckpointError(f"there is no checkpoint {folder / tag}. {_others(folder, Path())}")
    return path


def manifest(path: Path) -> dict[str, Any] | None:
    """Returns the manifest of a checkpoint; None if ds_ext did not write it.

    Raises:
        CheckpointError: the manifest is damaged, or has another format version.
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
        version = int(said["ds_ext"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        damaged = True
    if damaged:
        raise CheckpointError(f"{path / MANIFEST} is damaged.")
    if version > VERSION:
        raise CheckpointError(
            f"{path} has format {version} of ds_ext's checkpoints, but this ds_ext reads "
            f"format {VERSION}: a newer ds_ext wrote it. Install that version, or a newer one."
        )
    if version < VERSION:
        raise CheckpointError(
            f"{path} has format {version} of ds_ext's checkpoints, this ds_ext reads format "
            f"{VERSION}: load it with the version that wrote it, save_16bit_model there, and go on "
            "from that model."
        )
    try:
        _MANIFEST.validate_python(said, strict=True)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        key = ".".join(map(str, wrong["loc"]))
        raise CheckpointError(f"{path / MANIFEST} is damaged: {key}: {wrong['msg']}.") from None
    return said


def _checksum(said: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())


def verify(path: Path, files: dict[str, dict[str, int]], names: Iterable[str]) -> None:
    """Checks the sizes and checksums of files.

    Args:
        path: the folder of the checkpoint.
        files: the recorded results of ``size_and_checksum``, by file name.
        names: the files to check.

    Raises:
        CheckpointError: a file is missing, or has another size or checksum.
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
        if size_and_checksum(file) != files[name]:
            raise CheckpointError(
                f"{file} is damaged: its checksum differs. {_others(path.parent, path)}"
            )


def _others(folder: Path, path: Path) -> str:
    """Advice for an error message: checkpoints that a user can load instead of ``path``."""
    found = [c.tag for c in _complete(folder) if folder / c.tag != path]
    if not found:
        return f"No other complete checkpoint is in {folder}."
    return f"Nothing was loaded. Complete checkpoints in {folder}: {', '.join(found[:5])}."


def newest_checkpoint(folder: str | Path) -> Checkpoint | None:
    """Returns the newest checkpoint that is complete and undamaged, to resume after a failure.

    It is the one in the file ``latest``, which ``load_checkpoint`` loads without a tag. If that is
    missing, incomplete or damaged, it is the one of the most steps. Reads candidates once to verify
    them.

    Args:
        folder: the ``save_dir`` of engine.save_checkpoint, or the ``output_dir`` of HF Trainer. For
            Trainer, pass the result's ``folder`` to ``resume_from_checkpoint``.

    Returns:
        The checkpoint's location; None if there is no such checkpoint.
    """
    trainers = [
        c
        for inner in Path(folder).glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-\d+", inner.name) and (inner / "trainer_state.json").is_file()
        for c in _complete(inner)
    ]
    first = str(folder), _latest_or_none(Path(folder))
    found = [*_complete(Path(folder)), *trainers]
    for candidate in sorted(found, key=lambda c: (c[:2] != first, -c.steps)):
        try:
            path = find(Path(candidate.folder), candidate.tag)
            files = _manifest(path)["files"]
            verify(path, files, files)
            return candidate
        except (CheckpointError, OSError):
            continue
    return None


def _complete(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints: first the one that ``latest`` names, then by steps, newest first.

    Skips a checkpoint in a subfolder if its tag does not contain the subfolder. Such a checkpoint
    belongs to another run, which saved to the subfolder.
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
    latest = _latest_or_none(folder)
    return sorted(found, key=lambda c: (c.tag != latest, -c.steps, c.tag))


def _latest_or_none(folder: Path) -> str | None:
    """The tag in the file ``latest``; None if it is missing or empty."""
    file = folder / "latest"
    return (file.read_text().strip() or None) if file.is_file() else None
