"""Files of a checkpoint: written by DeepSpeed and described by us; verified and mapped to be read.

DeepSpeed's own code writes them, so that its tools read them: one with the model by each rank of
model parallelism (or by every rank, at stage 3), one with the optimizer by every rank.
"""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.checkpoint import constants
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from ds_ext.checkpoint import folder
from ds_ext.checkpoint.names import plain, with_plain_names
from ds_ext.checkpoint.pieces import Pieces, Saved
from ds_ext.engine.trusted import load
from ds_ext.errors import CheckpointError

Files = dict[str, dict[str, int]]  # the files that a rank has written: sizes and checksums


class Writer:
    """DeepSpeed's checkpoint engine while it saves: notes files, and errors instead of raising.

    A rank that raised would leave the others waiting in DeepSpeed's barriers.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.inner = engine.checkpoint_engine
        self.files: Files = {}
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __enter__(self) -> "Writer":
        self.engine.checkpoint_engine = self
        self.engine._copy_recovery_script = self._copy_recovery_script
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.checkpoint_engine = self.inner
        del self.engine._copy_recovery_script

    def save(self, state_dict: Any, path: str) -> None:
        """Writes a file, for DeepSpeed."""
        self._try(self._save, state_dict, Path(path))

    def written(self) -> Files:
        """Returns the files that this rank has written.

        Raises:
            Exception: the first that was raised in writing one.
        """
        if self.error is not None:
            raise self.error
        return self.files

    def _save(self, state_dict: Any, path: Path) -> None:
        if _is_model(path.name):
            state_dict = _not_to_be_converted(state_dict, path.name.startswith("zero_pp_rank_"))
        try:
            self.inner.save(state_dict, str(path))
        except Exception as error:
            free = shutil.disk_usage(path.parent).free / 2**20
            raise CheckpointError(
                f"{path} could not be written ({free:,.0f} MiB are free there): "
                f"{type(error).__name__}: {error}"
            ) from error
        self.files[path.name] = folder.describe(path)

    def _copy_recovery_script(self, path: str) -> None:
        self._try(DeepSpeedEngine._copy_recovery_script, self.engine, path)

    def _try(self, action: Callable[..., None], *args: Any) -> None:
        if self.error is None:
            try:
                action(*args)
            except Exception as error:
                self.error = error


def _not_to_be_converted(model: dict[str, Any], is_partitioned: bool) -> dict[str, Any]:
    """A model's file with what makes DeepSpeed's ds_to_universal end at once, and say why.

    Its path for stages 1 and 2 quotes reasons why tensor parallelism cannot be converted. Its path
    for stage 3 quotes the number that two layers of experts share; a model with DeepSpeed's experts
    is left as it is.
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
    """Returns what a manifest says of the files that each rank has written."""
    return {
        "model_files": [n for files in written for n in files if _is_model(n)],
        "state_files": [n for files in written for n in files if _holds_state(n, files)],
        "layer_files": [n for files in written for n in files if _LAYER.fullmatch(n)],
        "files": {n: f for files in written for n, f in files.items()},
    }


class Opened(NamedTuple):
    """The files of a checkpoint, mapped."""

    model: Saved  # the file of the model that is for this rank
    saved: list[Saved]  # what our optimizers saved, by rank; none if they were DeepSpeed's
    pieces: Pieces  # of these, and of weights that are in DeepSpeed's own files alone


def open_files(
    path: Path,
    manifest: Mapping[str, Any] | None,
    rank: int,
    names: set[str],
    layers: Mapping[int, str],
) -> Opened:
    """Maps the files of a checkpoint.

    Args:
        path: its folder.
        manifest: what ds_ext wrote of it; None if it was DeepSpeed's own optimizers that saved.
        rank: of this process among those of data parallelism.
        names: plain names of the model's parameters.
        layers: what names of parameters begin with, by layer of a PipelineModule, or nothing.

    Raises:
        CheckpointError: if a file is damaged or there is none.
    """
    if manifest is not None:
        model_files, layer_files = manifest["model_files"], manifest.get("layer_files", [])
        saved = [_state_in(path / name) for name in manifest["state_files"]]
    else:
        found = sorted(f.name for f in path.glob("*.pt"))
        model_files, layer_files = [
            [*filter(is_one, found)] for is_one in (_is_model, _LAYER.fullmatch)
        ]
        saved = []
    if not model_files:
        raise CheckpointError(f"{path} holds no checkpoint: no file *model_states.pt.")
    models = [load(path / name) for name in model_files]
    if manifest is None:
        _refuse_unfinished(path, models[0].get("optimizer"))
    model = models[rank % len(models)]
    if bool(layer_files) != bool(layers):
        one, other = ("a PipelineModule", "none") if layer_files else ("no PipelineModule", "one")
        raise CheckpointError(f"{path} is of {one}, and the model to be loaded is {other}.")
    if layers:
        model = {**model, "module": _of_layers(path, layer_files, layers)}
    wanted = names - {name for own in saved for name in own["weights"]}
    if not model_files[0].startswith("zero_pp_rank_"):  # the weights are whole
        weights = [_whole_weights((model if layers else models[0])["module"], wanted)]
    elif saved:
        weights = [_frozen_weights(model, r, wanted) for r, model in enumerate(models)]
    else:
        for file in path.glob("*.pt"):
            load(file)  # DeepSpeed's function would run what is in it
        whole = get_fp32_state_dict_from_zero_checkpoint(
            str(path.parent), path.name, lazy_mode=True
        )
        weights = [_whole_weights(whole, wanted)]
    pieces = Pieces([*saved, *({"weights": found} for found in weights)])
    return Opened(model, saved, pieces)


def _of_layers(path: Path, files: Sequence[str], layers: Mapping[int, str]) -> dict[str, Any]:
    """The weights and buffers of all layers of a pipeline, by their names in the model."""
    found = {}
    for name in files:
        match = _LAYER.fullmatch(name)
        prefix = None if match is None else layers.get(int(match[1]))
        if prefix is None:
            raise CheckpointError(f"{path / name} is of a layer that the model does not have.")
        found.update({prefix + key: value for key, value in load(path / name).items()})
    return found


_LAYER = re.compile(r"layer_(\d+)-(?:.*-)?model_states\.pt")  # of a PipelineModule


def _is_model(name: str) -> bool:
    """Whether a file is of the model's weights, and not of one expert's or layer's."""
    is_part = re.match(r"(layer_-?\d+_)?expert_\d+_", name) or _LAYER.fullmatch(name)
    return name.endswith("model_states.pt") and not is_part


def _holds_state(name: str, files: Mapping[str, Any]) -> bool:
    """Whether a rank's optimizer is in this file: in the model's, where there is no other."""
    if any("optim_states" in other for other in files):
        return "optim_states" in name
    return not _LAYER.fullmatch(name)


def _state_in(path: Path) -> Saved:
    """What ``Contents.save`` returned on a rank, in the file where DeepSpeed has put it."""
    found = load(path)
    return with_plain_names(found.get("optimizer_state_dict") or found["optimizer"])


def _refuse_unfinished(path: Path, optimizer: Any) -> None:
    """Raises CheckpointError if ds_ext wrote the files after all."""
    files = [load(file) for file in path.glob("*_rank_0_*optim_states.pt")]
    optimizers = [optimizer, *(file["optimizer_state_dict"] for file in files)]
    if any(isinstance(o, dict) and "ds_ext" in o for o in optimizers):
        raise CheckpointError(f"{path} is not complete: {folder.MANIFEST} is missing.")


def _whole_weights(found: Mapping[str, Any], wanted: set[str]) -> dict[str, Any]:
    """Those of whole tensors that are wanted, by plain name: a piece each."""
    own_names = {plain(name): name for name in found}
    pieces = {}
    for name in wanted & own_names.keys():
        values = found[own_names[name]]
        shape = values.shape
        pieces[name] = {"start": 0, "total": shape.numel(), "values": values, "shape": list(shape)}
    return pieces


def _frozen_weights(model: Saved, rank: int, wanted: set[str]) -> dict[str, Any]:
    """Those that are wanted of weights cut into equal parts, by plain name: one rank's pieces."""
    found = model["frozen_param_fragments"] or {}
    own_names = {plain(name): name for name in found}
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
