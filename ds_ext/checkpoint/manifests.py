"""Manifests of checkpoints: reads them, verifies the files, and finds the newest checkpoint."""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ds_ext.errors import CheckpointError

MANIFEST = "ds_ext.json"
VERSION = 4  # format version of manifest and contents; 0.1.0 writes 4
INCOMPLETE, COMPLETE = ".incomplete-", ".complete"  # names of folders: see ``folder``


class Checkpoint(NamedTuple):
    """The location of a checkpoint: ``engine.load_checkpoint(folder, tag)`` loads it."""

    folder: str
    tag: str
    steps: int  # the number of steps before the save


def size_and_checksum(path: Path) -> dict[str, int]:
    """Flushes a file to disk; returns its size in bytes and its CRC-32."""
    size, checksum = 0, 0
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        while block := file.read(2**22):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return {"bytes": size, "crc32": checksum}


def locate(path: Path, name: str) -> Path:
    """Returns the path of a checkpoint's file, even if a killed job has not moved it into place."""
    new = path / COMPLETE / name
    return new if os.path.isfile(new) else path / name


def latest(folder: Path) -> str | None:
    """Returns the text of the file ``latest``, a tag; None if nothing was ever saved."""
    file = folder / "latest"
    return file.read_text().strip() if file.is_file() else None


def read(path: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint.

    Raises:
        CheckpointError: the manifest is missing or damaged, or has another format version.
    """
    try:
        said: dict[str, Any] = json.loads(locate(path, MANIFEST).read_text())
        damaged = said.pop("crc32") != _checksum(said)
        version = int(said["ds_ext"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        damaged = True
    if damaged:
        raise CheckpointError(f"{path / MANIFEST} is damaged.")
    if version != VERSION:
        age = "a newer" if version > VERSION else "an older"
        raise CheckpointError(
            f"{path} has format {version} of ds_ext's checkpoints, but this ds_ext reads format "
            f"{VERSION}: {age} ds_ext wrote it. Use that version."
        )
    return said


def text(manifest: Mapping[str, Any]) -> str:
    """Returns the text of a manifest's file, with a checksum of the manifest."""
    return json.dumps({**manifest, "crc32": _checksum(manifest)}, indent=1)


def _checksum(said: Mapping[str, Any]) -> int:
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
        file, recorded = locate(path, name), files[name]
        if not file.is_file():
            fault = "is missing"
        elif (size := file.stat().st_size) != recorded["bytes"]:
            fault = f"is damaged: {size} bytes of {recorded['bytes']}"
        elif size_and_checksum(file) != recorded:
            fault = "is damaged: its checksum differs"
        else:
            continue
        raise CheckpointError(f"{file} {fault}.")


def advice(folder: str, path: Path | None = None) -> str:
    """Returns the end of an error message: checkpoints that a user can load instead of ``path``."""
    found = [c.tag for c in _complete(Path(folder)) if Path(folder, c.tag) != path]
    if not found:
        return f"No other complete checkpoint is in {folder}."
    return f"Nothing was loaded. Complete checkpoints in {folder}: {', '.join(found[:5])}."


def newest_checkpoint(folder: str | Path) -> Checkpoint | None:
    """Returns the newest checkpoint that is complete and undamaged, to resume after a failure.

    It is the one in the file ``latest``, which ``load_checkpoint`` loads without a tag. If that is
    missing, incomplete or damaged, it is the one of the most steps whose tag has no "/". Reads
    candidates once to verify them.

    Args:
        folder: the ``save_dir`` of engine.save_checkpoint, or the ``output_dir`` of HF Trainer
            under DeepSpeed. For Trainer, pass the result's ``folder`` to
            ``resume_from_checkpoint``.

    Returns:
        The checkpoint's location; None if there is no such checkpoint.

    Raises:
        ValueError: the folder has only checkpoints that HF Trainer has saved without DeepSpeed.
    """
    trainers = [
        c
        for inner in Path(folder).glob("checkpoint-*")
        if (inner / "trainer_state.json").is_file()
        for c in _complete(inner)
    ]
    first = str(folder), latest(Path(folder))
    found = [*_complete(Path(folder)), *trainers]
    if not found and any(Path(folder).glob("checkpoint-*/optimizer.pt")):
        raise ValueError(
            f"HF Trainer has saved the checkpoints in {folder} without DeepSpeed: find the newest "
            "one by transformers.trainer_utils.get_last_checkpoint(folder)."
        )
    for candidate in sorted(found, key=lambda c: (c[:2] != first, -c.steps)):
        try:
            path = Path(candidate.folder, candidate.tag)
            files = read(path)["files"]
            verify(path, files, files)
            return candidate
        except (CheckpointError, OSError):
            continue
    return None


def _complete(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints: first the one that ``latest`` names, then by steps, newest first."""
    found, newest = [], latest(folder)
    here = (p.name for p in folder.glob("*") if not p.name.startswith(INCOMPLETE))
    for tag in dict.fromkeys([newest, *here] if newest else here):
        path = folder / tag
        try:
            said = read(path)
            if all(locate(path, n).stat().st_size == f["bytes"] for n, f in said["files"].items()):
                found.append(Checkpoint(str(folder), tag, said["global_steps"]))
        except (CheckpointError, OSError):
            continue
    return sorted(found, key=lambda c: (c.tag != newest, -c.steps, c.tag))
