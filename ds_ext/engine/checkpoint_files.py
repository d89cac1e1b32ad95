"""Records and memory-maps the files of a checkpoint, which DeepSpeed's own code writes.

DeepSpeed's tools can therefore read the files. Each model-parallel rank (at stage 3 every rank)
writes a file with the model. Every rank writes a file with the optimizer.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.checkpoint import constants
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from ds_ext.checkpoint import manifests
from ds_ext.checkpoint.manifests import locate
from ds_ext.checkpoint.pieces import Pieces, Saved, plain_name, with_plain_names
from ds_ext.engine.safe_unpickling import load
from ds_ext.errors import CheckpointError

Files = dict[str, dict[str, int]]  # sizes and checksums of files, by name


class Writer:
    """Replaces DeepSpeed's checkpoint engine during a save, to record the files of this rank."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.inner = engine.checkpoint_engine
        self.files: Files = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __enter__(self) -> "Writer":
        self.engine.checkpoint_engine = self
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.checkpoint_engine = self.inner

    def save(self, state_dict: Any, path: str) -> None:
        """Writes a file. DeepSpeed calls it."""
        file = Path(path)
        if _is_model(file.name):
            state_dict = _block_conversion(state_dict, file.name.startswith("zero_pp_rank_"))
        try:
            self.inner.save(state_dict, path)
        except Exception as error:
            free = shutil.disk_usage(file.parent).free / 2**20
            raise CheckpointError(
                f"{path} could not be written ({free:,.0f} MiB are free there): "
                f"{type(error).__name__}: {error}"
            ) from error
        self.files[file.name] = manifests.size_and_checksum(file)


def _block_conversion(model: dict[str, Any], is_partitioned: bool) -> dict[str, Any]:
    """Adds entries to a model's file that make DeepSpeed's ds_to_universal fail with a reason.

    At stages 1 and 2 the script prints the entry for unsupported tensor-parallel patterns. At stage
    3 it prints an id that two expert layers share. A stage-3 model with DeepSpeed's experts gets
    only the first entry.
    """
    unsupported = getattr(constants, "AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS", None)
    if unsupported is None:  # an older DeepSpeed
        return model
    info = {**(model.get(constants.UNIVERSAL_CHECKPOINT_INFO) or {}), unsupported: _WHY_NOT}
    model = {**model, constants.UNIVERSAL_CHECKPOINT_INFO: info}
    if is_partitioned and "num_experts" not in model:
        why = "; ".join(": ".join(reason) for reason in _WHY_NOT.items())
        sizes = dict.fromkeys(("num_experts", "num_local_experts", "ep_size"), 1)
        layer = {"moe_layer_id": why, "module_path": "", **sizes}
        twice = [{**layer, "expert_key_prefix": prefix} for prefix in "ab"]
        model[constants.AUTOEP_LAYERS_KEY] = twice
    return model


_WHY_NOT = {
    "checkpoints of ds_ext": "they need no conversion, engine.load_checkpoint loads them as they "
    "are, on any number of ranks and at any ZeRO stage"
}


def listed(written: Sequence[Files]) -> dict[str, Any]:
    """Returns the manifest's entries for the files that each rank has written."""
    return {
        "model_files": [n for files in written for n in files if _is_model(n)],
        "state_files": [n for files in written for n in files if _holds_state(n, files)],
        "layer_files": [n for files in written for n in files if _LAYER.fullmatch(n)],
        "files": {n: f for files in written for n, f in files.items()},
    }


class CheckpointData(NamedTuple):
    """The memory-mapped files of a checkpoint."""

    model: Saved  # this rank's model file
    saved: list[Saved]  # states of ds_ext optimizers, by rank; empty for DeepSpeed's optimizers
    pieces: Pieces  # of ``saved``, and of weights in DeepSpeed's files


def open_files(
    path: Path,
    manifest: Mapping[str, Any] | None,
    rank: int,
    names: set[str],
    layers: Mapping[int, str],
) -> CheckpointData:
    """Memory-maps the files of a checkpoint.

    Args:
        path: the checkpoint's folder.
        manifest: the manifest of ds_ext; None for a checkpoint of DeepSpeed's own optimizers.
        rank: the data-parallel rank of this process.
        names: plain names of the model's parameters.
        layers: name prefixes by layer number of a PipelineModule; empty for other models.

    Raises:
        CheckpointError: a file is damaged, or the folder has no model file.
    """
    if manifest is not None:
        model_files, layer_files = manifest["model_files"], manifest.get("layer_files", [])
        saved = [_state_in(locate(path, name)) for name in manifest["state_files"]]
    else:
        found = sorted(f.name for f in path.glob("*.pt"))
        model_files, layer_files = [
            [*filter(is_one, found)] for is_one in (_is_model, _LAYER.fullmatch)
        ]
        saved = []
    if not model_files:
        raise CheckpointError(f"{path} holds no checkpoint: no file *model_states.pt.")
    models = [load(locate(path, name)) for name in model_files]
    if manifest is None:
        _refuse_unfinished(path, models[0].get("optimizer"))
    model = models[rank % len(models)]
    if bool(layer_files) != bool(layers):
        was, here = ("was", "is not") if layer_files else ("was not", "is")
        raise CheckpointError(
            f"{path} {was} saved from a PipelineModule, but this model {here} a PipelineModule."
        )
    if layers:
        model = {**model, "module": _of_layers(path, layer_files, layers)}
    wanted = names - {name for own in saved for name in own["weights"]}
    if not model_files[0].startswith("zero_pp_rank_"):  # the weights are not partitioned
        weights = [_whole_weights((model if layers else models[0])["module"], wanted)]
    elif saved:
        weights = [_frozen_weights(model, r, wanted) for r, model in enumerate(models)]
    else:
        for file in path.glob("*.pt"):
            load(file)  # raises for unsafe pickles, which DeepSpeed's function would run
        whole = get_fp32_state_dict_from_zero_checkpoint(
            str(path.parent), path.name, lazy_mode=True
        )
        weights = [_whole_weights(whole, wanted)]
    pieces = Pieces([*saved, *({"weights": found} for found in weights)])
    return CheckpointData(model, saved, pieces)


def _of_layers(path: Path, files: Sequence[str], layers: Mapping[int, str]) -> dict[str, Any]:
    """The weights and buffers of all pipeline layers, by name in the model."""
    found = {}
    for name in files:
        match = _LAYER.fullmatch(name)
        prefix = None if match is None else layers.get(int(match[1]))
        if prefix is None:
            raise CheckpointError(f"{path / name} contains a layer that the model does not have.")
        found.update({prefix + key: value for key, value in load(locate(path, name)).items()})
    return found


_LAYER = re.compile(r"layer_(\d+)-(?:.*-)?model_states\.pt")  # a layer of a PipelineModule


def _is_model(name: str) -> bool:
    """Whether a file contains the model, rather than one expert or layer."""
    is_part = re.match(r"(layer_-?\d+_)?expert_\d+_", name) or _LAYER.fullmatch(name)
    return name.endswith("model_states.pt") and not is_part


def _holds_state(name: str, files: Mapping[str, Any]) -> bool:
    """Whether a file contains optimizer state. Without optimizer files, model files do."""
    if any("optim_states" in other for other in files):
        return "optim_states" in name
    return not _LAYER.fullmatch(name)


def _state_in(path: Path) -> Saved:
    """The result of ``Contents.save`` on one rank, read from its file."""
    found = load(path)
    return with_plain_names(found.get("optimizer_state_dict") or found["optimizer"])


def _refuse_unfinished(path: Path, optimizer: Any) -> None:
    """Raises CheckpointError if ds_ext wrote the files but not the manifest."""
    files = [load(file) for file in path.glob("*_rank_0_*optim_states.pt")]
    optimizers = [optimizer, *(file["optimizer_state_dict"] for file in files)]
    if any(isinstance(o, dict) and "ds_ext" in o for o in optimizers):
        raise CheckpointError(f"{path} is not complete: {manifests.MANIFEST} is missing.")


def _whole_weights(found: Mapping[str, Any], wanted: set[str]) -> dict[str, Any]:
    """A piece of each wanted tensor in ``found``, by plain name."""
    own_names = {plain_name(name): name for name in found}
    pieces = {}
    for name in wanted & own_names.keys():
        values = found[own_names[name]]
        shape = values.shape
        pieces[name] = {"start": 0, "total": shape.numel(), "values": values, "shape": list(shape)}
    return pieces


def _frozen_weights(model: Saved, rank: int, wanted: set[str]) -> dict[str, Any]:
    """One rank's pieces of wanted frozen weights, by plain name. Parts have equal sizes."""
    found = model["frozen_param_fragments"] or {}
    own_names = {plain_name(name): name for name in found}
    pieces = {}
    for name in wanted & own_names.keys():
        values, shape = found[own_names[name]], model["frozen_param_shapes"][own_names[name]]
        size, total = values.numel(), shape.numel()
        start = min(rank * size, total)
        pieces[name] = {
            "start": start,
            "total": total,
            "values": values.reshape(-1)[: total - start],  # without padding
            "shape": list(shape),
        }
    return pieces
