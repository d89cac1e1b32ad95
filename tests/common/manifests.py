"""Manifests of checkpoints, as ``engine.save_checkpoint`` writes them."""

from typing import Any

from ds_ext.checkpoint import manifests


def manifest(tag: str, steps: int, files: dict[str, dict[str, int]]) -> dict[str, Any]:
    """The manifest of a checkpoint with these files, none of which holds states."""
    said = {"ds_ext": manifests.VERSION, "tag": tag, "global_steps": steps, "files": files}
    return said | {"model_files": [], "state_files": []}
