"""Implements engine.load_checkpoint: all ranks load a checkpoint, or all raise before any change.

1. Find the folder, read its manifest, and verify the files.
2. Map the files. A rank opens only those that its pieces are in.
3. ``checks.check``.
4. ``Contents.load``, and the parts of DeepSpeed.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from ds_ext.checkpoint import checks, folder, manifests
from ds_ext.checkpoint.manifests import locate
from ds_ext.checkpoint.pieces import Files, Pieces, Saved, plain_name, with_plain_names
from ds_ext.distributed import consensus
from ds_ext.distributed.layout import Layout
from ds_ext.engine import checkpoint_contents, pipeline
from ds_ext.engine.checkpoint_contents import Contents
from ds_ext.engine.rank_logging import log, warn
from ds_ext.engine.safe_unpickling import load
from ds_ext.engine.saving import LAYER_FILE, common_tag, is_model_file, raises_on_all_ranks
from ds_ext.errors import CheckpointError
from ds_ext.ops import int8


@raises_on_all_ranks
def load_checkpoint(
    engine: DeepSpeedEngine,
    load_dir: str,
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., Any] | None = None,
) -> tuple[str | None, dict[str, Any] | None]:
    """Loads a checkpoint that was saved by any number of ranks, at any ZeRO stage.

    Args:
        engine: the engine to load the model, optimizer and counts into.
        load_dir: the ``save_dir`` of ``save_checkpoint``.
        tag: the name of the checkpoint; by default the latest.
        load_module_strict: whether the model and the checkpoint must have the same parameters.
        load_optimizer_states: whether to load the optimizer's state; otherwise it is reset.
        load_lr_scheduler_states: whether to load the learning-rate scheduler.
        load_module_only: whether to load only weights and buffers.
        custom_load_fn: must be None.

    Returns:
        The folder and the ``client_state`` passed to ``save_checkpoint``; None and None if nothing
        was ever saved in ``load_dir``.

    Raises:
        CheckpointError: on every rank, before anything changes, if the checkpoint is damaged,
            belongs to another model or optimizer, or was saved by an optimizer of DeepSpeed.
        ValueError: ``custom_load_fn`` is set, or the tag is not a valid name.
    """
    if custom_load_fn is not None:
        raise ValueError("load_checkpoint: ds_ext reads weights in pieces; remove custom_load_fn.")
    engine.optimizer.optimizer.refuse_exchanged()
    tag = common_tag(engine, tag)
    if tag is None:
        tag = _latest(load_dir)
    if tag is None:
        warn(
            f"there is no checkpoint in {load_dir}: nothing is loaded. Name the folder that was "
            'given to save_checkpoint, which has a file "latest", or a tag.'
        )
        return None, None
    path = folder.checkpoint_path(load_dir, tag)
    pipeline.follow_groups(engine, engine.optimizer.optimizer)
    contents = Contents(engine)
    manifest = consensus.run_on_all_ranks(
        lambda: _verified(engine, path),
        lambda text: CheckpointError(f"{text} {manifests.advice(load_dir, path)}"),
    )
    model, pieces = consensus.run_on_all_ranks(
        lambda: _open(contents, path, manifest), CheckpointError
    )
    with_state = load_optimizer_states and not load_module_only
    names = [plain_name(weight.name) for weight in contents.layout.weights]  # on all ranks

    def load_contents() -> None:
        engine.optimizer.checkpoint_event_prologue()
        contents.load(pieces, with_state)
        if not with_state:
            kind = type(contents.optimizer).__name__
            log(f"{path}: only weights are loaded, the state of {kind} starts from zero")
        checkpoint_contents.load_buffers(engine.module, model)

    consensus.run_on_all_ranks(
        lambda: checks.check(
            pieces, contents.optimizer, contents.owned, load_module_strict, names, with_state
        ),
        lambda text: CheckpointError(f"{path}: {text}"),
    )
    consensus.run_on_all_ranks(load_contents, CheckpointError)
    _publish(contents.layout)
    if not load_module_only:
        consensus.run_on_all_ranks(
            lambda: checkpoint_contents.load_counts(engine, model, load_lr_scheduler_states),
            CheckpointError,
        )
    return str(path), checkpoint_contents.client_state(model)


def _publish(layout: Layout) -> None:
    """Sends loaded runs to the ranks that hold full parameters, if they have not read all."""
    layout.publish([p for p in layout.names if int8.find(p) is None])
    layout.end_step()


def _latest(load_dir: str) -> str | None:
    """The newest tag; None if nothing was ever saved. Checks that all ranks read the same tag."""
    tag = consensus.run_on_all_ranks(lambda: manifests.latest(Path(load_dir)), CheckpointError)
    seen = consensus.gathered(tag)
    if other := [rank for rank, found in enumerate(seen) if found != seen[0]]:
        raise CheckpointError(
            f"{load_dir}/latest is {seen[0]!r} on rank 0 and {seen[other[0]]!r} on rank "
            f"{other[0]}: name the full path of a folder on a file system that all ranks share."
        )
    if tag == "":
        raise CheckpointError(f"{load_dir}/latest is empty. {manifests.advice(load_dir)}")
    return tag


def _verified(engine: DeepSpeedEngine, path: Path) -> dict[str, Any]:
    """The manifest. Verifies this rank's share of the files."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}.")
    if not locate(path, manifests.MANIFEST).is_file():
        raise CheckpointError(
            f"{path}: {manifests.MANIFEST} is missing, because the save was not completed, or an "
            "optimizer of DeepSpeed made it. Of such an optimizer, load the weights before "
            "deepspeed.initialize, with from_pretrained or load_state_dict: "
            "deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint returns them."
        )
    manifest = manifests.read(path)
    layout = engine.optimizer.layout
    saved = manifest.get("tensor_parallel", 1)
    size = max(1, engine.autotp_size())
    if saved != size:
        raise CheckpointError(
            f"{path} was saved with tensor_parallel.autotp_size = {saved}, this engine "
            f"has {size}: ds_ext loads it on any number of ranks and at any ZeRO stage, but "
            "with the same autotp_size."
        )
    files = manifest["files"]
    manifests.verify(path, files, list(files)[layout.rank :: layout.world])
    return manifest


def _open(contents: Contents, path: Path, manifest: Mapping[str, Any]) -> tuple[Saved, Pieces]:
    """Maps the files of a checkpoint.

    Returns this rank's model file, and the pieces of all ranks' states and of frozen weights.
    """
    layers = pipeline.layer_names(contents.engine)
    model_files = list(filter(is_model_file, manifest["files"]))
    layer_files = list(filter(LAYER_FILE.fullmatch, manifest["files"]))
    if bool(layer_files) != bool(layers):
        was, here = ("was", "is not") if layer_files else ("was not", "is")
        raise CheckpointError(
            f"{path} {was} saved from a PipelineModule, but this model {here} a PipelineModule."
        )
    rank = contents.layout.rank
    models = Files([locate(path, name) for name in model_files], load)
    model: Saved = models[rank % len(models)]
    if layers:
        model = {**model, "module": _of_layers(path, layer_files, layers)}
    saved = Files([locate(path, name) for name in manifest["state_files"]], _state_in)
    index = None
    if "names" in manifest:
        index = {section: set(names) for section, names in manifest["names"].items()}
    names = {own.name for own in contents.owned.values()}
    wanted = names - Pieces(saved, index).weight_names()
    if model_files[0].startswith("zero_pp_rank_"):  # ZeRO-3 divides frozen weights, too
        weights = Files(range(len(models)), lambda r: _frozen_weights(models[r], r, wanted))
    else:
        module = (model if layers else models[0])["module"]
        whole = {"frozen_param_fragments": module, "frozen_param_shapes": {}}
        weights = Files([whole], lambda found: _frozen_weights(found, 0, wanted))
    return model, Pieces(saved, index, weights, rank / contents.layout.world)


def _state_in(path: Path) -> Saved:
    """The result of ``Contents.save`` on one rank, read from its file."""
    found = checkpoint_contents.state_in(load(path))
    assert found is not None, "the manifest lists files without states"
    return with_plain_names(found)


def _of_layers(path: Path, files: list[str], layers: Mapping[int, str]) -> dict[str, Any]:
    """The weights and buffers of all pipeline layers, by name in the model."""
    found = {}
    for name in files:
        match = LAYER_FILE.fullmatch(name)
        prefix = None if match is None else layers.get(int(match[1]))
        if prefix is None:
            raise CheckpointError(f"{path / name} contains a layer that the model does not have.")
        found.update({prefix + key: value for key, value in load(locate(path, name)).items()})
    return found


def _frozen_weights(model: Saved, rank: int, wanted: set[str]) -> dict[str, Any]:
    """One rank's pieces of wanted frozen weights, by plain name. Parts have equal sizes."""
    pieces = {}
    for own_name, values in (model["frozen_param_fragments"] or {}).items():
        if (name := plain_name(own_name)) in wanted:
            shape = model["frozen_param_shapes"].get(own_name, values.shape)
            total = shape.numel()
            start = min(rank * values.numel(), total)
            own = values.reshape(-1)[: total - start]  # without padding
            pieces[name] = {"start": start, "total": total, "values": own, "shape": list(shape)}
    return {"weights": pieces}
