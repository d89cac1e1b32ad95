"""Implements engine.save_checkpoint and engine.load_checkpoint, which succeed completely or fail.

| saving, on all ranks together                      | loading, on all ranks together          |
|----------------------------------------------------|-----------------------------------------|
| choose the folder, and create a temporary folder   | find the folder                         |
| ``Contents.save``, and the parts of DeepSpeed      | read the manifest and verify the files  |
| write the files, and compute checksums             | map the files                           |
| write the manifest                                 | ``Contents.check``                      |
| move the folder into place                         | ``Contents.load``, and DeepSpeed's parts|

An error on one rank raises on every rank, at once. Saving raises before it changes an older
checkpoint. Loading raises before it changes the engine.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from deepspeed.runtime.engine import DeepSpeedEngine

from ds_ext.backward.fused_backward import FusedBackward
from ds_ext.checkpoint import checks, folder, manifests
from ds_ext.distributed import consensus
from ds_ext.engine import checkpoint_contents, checkpoint_files, pipeline
from ds_ext.engine.checkpoint_contents import Contents
from ds_ext.engine.checkpoint_files import CheckpointData, Files, Writer
from ds_ext.engine.rank_logging import log, warn
from ds_ext.errors import CheckpointError
from ds_ext.ops import int8

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def _raises_on_all_ranks(function: F) -> F:
    """Decorator of functions that all ranks call: an error on one rank is raised on all."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return consensus.run_on_all_ranks(lambda: function(*args, **kwargs))

    return cast(F, call)


@_raises_on_all_ranks
def save_checkpoint(
    engine: DeepSpeedEngine,
    save_dir: str,
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Saves a checkpoint in DeepSpeed's files; takes the arguments of its ``save_checkpoint``.

    Args:
        engine: the engine, with its model, optimizer and counts.
        save_dir: a folder on a file system that all ranks share.
        tag: the name of the checkpoint's folder in ``save_dir``; by default "global_step" and the
            step.
        client_state: a dictionary that ``load_checkpoint`` will return.
        save_latest: whether ``load_checkpoint`` without a tag loads this checkpoint.
        exclude_frozen_parameters: whether to leave out frozen weights.

    Returns:
        True.

    Raises:
        CheckpointError: on every rank, if any rank fails to write.
        RuntimeError: between ``backward`` and ``step``, if weights were already updated.
        ValueError: the tag is not a valid name, or ranks pass different tags and
            ``checkpoint.tag_validation`` is "Fail".
    """
    _check_complete(engine.optimizer.fused)
    pipeline.follow_groups(engine, engine.optimizer.optimizer)
    path = _path(engine, save_dir, tag)
    options = client_state or {}, save_latest, exclude_frozen_parameters
    consensus.run_on_all_ranks(
        lambda: _save(engine, save_dir, path, *options),
        lambda text: CheckpointError(
            f"checkpoint {path} could not be saved. Earlier checkpoints are unchanged. {text}"
        ),
    )
    return True


@_raises_on_all_ranks
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

    If DeepSpeed's own optimizer saved the checkpoint, only weights and counts are loaded.

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
        CheckpointError: on every rank, before anything changes, if the checkpoint is damaged or
            belongs to another model or optimizer.
        ValueError: ``custom_load_fn`` is set, or the tag is not a valid name.
    """
    if custom_load_fn is not None:
        raise ValueError("load_checkpoint: ds_ext reads weights in pieces; remove custom_load_fn.")
    engine.optimizer.optimizer.refuse_exchanged()
    tag = _common(engine, tag)
    if tag is None:
        tag = _latest(load_dir)
    if tag is None:
        log(f"there is no checkpoint in {load_dir}: nothing is loaded")
        return None, None
    folder.checkpoint_path(load_dir, tag)  # raises if the tag is not a valid name
    pipeline.follow_groups(engine, engine.optimizer.optimizer)
    path = consensus.run_on_all_ranks(lambda: manifests.find(Path(load_dir), tag), CheckpointError)
    contents = Contents(engine, engine.optimizer.fused, engine.optimizer.loss_scaler)
    manifest = consensus.run_on_all_ranks(lambda: _verified(engine, path), CheckpointError)
    opened = consensus.run_on_all_ranks(lambda: _opened(contents, path, manifest), CheckpointError)
    with_state = manifest is not None and load_optimizer_states and not load_module_only
    consensus.run_on_all_ranks(
        lambda: _check(contents, opened, with_state, load_module_strict),
        lambda text: CheckpointError(f"{path}: {text}"),
    )
    consensus.run_on_all_ranks(lambda: _load(contents, opened, with_state, path), CheckpointError)
    _publish(contents)
    if not load_module_only:
        consensus.run_on_all_ranks(
            lambda: _load_counts(engine, opened, load_lr_scheduler_states), CheckpointError
        )
    return str(path), checkpoint_contents.client_state(opened.model)


def _on_first_rank(engine: DeepSpeedEngine, action: Callable[[], T]) -> T | None:
    """Runs an action on the first rank. Raises CheckpointError on all ranks if it fails."""
    is_first = engine.global_rank == 0
    return consensus.run_on_all_ranks(lambda: action() if is_first else None, CheckpointError)


# Saving.


def _check_complete(fused: FusedBackward) -> None:
    """Raises RuntimeError if an unfinished step has updated weights or projected gradients."""
    fused.optimizer.refuse_exchanged()
    state = fused.state
    is_measured = state.square is not None and not state.kept
    if state.used_up or state.projected or is_measured:
        raise RuntimeError(
            "save_checkpoint was called between backward and engine.step(): call it after the step."
        )


def _path(engine: DeepSpeedEngine, save_dir: str, tag: str | None) -> Path:
    """The path of the checkpoint to save. Checks that it is equal on all ranks."""
    if not save_dir:
        raise ValueError(f"save_checkpoint: save_dir is {save_dir!r}; name a folder.")
    tag = _common(engine, tag)
    path = folder.checkpoint_path(
        save_dir, f"global_step{engine.global_steps}" if tag is None else tag
    )
    consensus.agree({"checkpoint path": str(path)})
    return path


def _common(engine: DeepSpeedEngine, tag: str | None) -> str | None:
    """The first rank's tag. ``checkpoint.tag_validation`` decides whether tags may differ."""
    tags = consensus.gathered(None if tag is None else str(tag))
    if len(set(tags)) > 1 and engine.checkpoint_tag_validation_enabled():
        names = ", ".join(map(repr, tags[:4])) + ", …" * (len(tags) > 4)
        if engine.checkpoint_tag_validation_fail():
            raise ValueError(
                f"the ranks give different tags: {names}. Give all ranks the same tag, or set "
                'checkpoint.tag_validation to "Warn" or "Ignore" to use rank 0\'s tag.'
            )
        warn(f"the ranks give different tags ({names}): all ranks use rank 0's tag")
    return tags[0]


def _save(
    engine: DeepSpeedEngine,
    save_dir: str,
    path: Path,
    client_state: Mapping[str, Any],
    save_latest: bool,
    exclude_frozen_parameters: bool,
) -> None:
    """Saves a checkpoint to ``path``, a folder in ``save_dir``."""
    draft = _on_first_rank(engine, lambda: folder.prepare(path))

    def fill() -> None:
        (aside,) = filter(None, consensus.gathered(draft.aside if draft else None))
        files = _write(engine, save_dir, aside, client_state, exclude_frozen_parameters)
        written = consensus.gathered(files)
        engine.optimizer.checkpoint_event_epilogue()
        if draft is not None:  # on the first rank
            manifest = _manifest(engine, str(path.relative_to(save_dir)), written)
            folder.commit(draft, manifest, save_latest)

    try:
        consensus.run_on_all_ranks(fill, CheckpointError)
    finally:
        if draft is not None:
            folder.close(draft)  # after all ranks have stopped writing


def _write(
    engine: DeepSpeedEngine,
    save_dir: str,
    aside: Path,
    client_state: Mapping[str, Any],
    exclude_frozen_parameters: bool,
) -> Files:
    """Makes DeepSpeed write this rank's files into the folder ``aside``; returns the files.

    Communicates nothing: in DeepSpeed's own ``save_checkpoint``, the other ranks would wait at a
    barrier for a rank that failed.

    Raises:
        CheckpointError: this rank does not see the folder, which rank 0 has made.
    """
    if not aside.is_dir():
        raise CheckpointError(f"{aside}: the folder must lie on a file system that all ranks share")
    name = str(aside.relative_to(save_dir) if aside.is_relative_to(save_dir) else aside)
    save_weights = engine._save_checkpoint
    if engine.has_moe_layers:
        engine.save_non_zero_checkpoint, save_weights = False, engine._save_moe_checkpoint
    engine.optimizer.checkpoint_event_prologue()
    with Writer(engine) as writer:
        save_weights(
            save_dir,
            name,
            client_state=client_state,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        if engine.save_zero_checkpoint:
            engine._save_zero_checkpoint(save_dir, name)
    return writer.files


def _manifest(engine: DeepSpeedEngine, tag: str, written: Sequence[Files]) -> dict[str, Any]:
    """The manifest of a checkpoint, from the files that each rank has written."""
    return {
        "ds_ext": manifests.VERSION,
        "tag": tag,
        "global_steps": engine.global_steps,
        "optimizer": type(engine.optimizer.optimizer).__name__,
        "zero_stage": int(engine.zero_optimization_stage()),
        "ranks": engine.optimizer.layout.world,
        "tensor_parallel": max(1, engine.autotp_size()),
        **checkpoint_files.listed(written),
    }


# Loading.


def _latest(load_dir: str) -> str | None:
    """The newest tag; None if nothing was ever saved. Checks that all ranks read the same tag."""
    tag = consensus.run_on_all_ranks(lambda: manifests.latest(Path(load_dir)), CheckpointError)
    seen = consensus.gathered(tag)
    if other := [rank for rank, found in enumerate(seen) if found != seen[0]]:
        raise CheckpointError(
            f"{load_dir}/latest is {seen[0]!r} on rank 0 and {seen[other[0]]!r} on rank "
            f"{other[0]}: name the full path of a folder on a file system that all ranks share."
        )
    return tag


def _verified(engine: DeepSpeedEngine, path: Path) -> dict[str, Any] | None:
    """The manifest, or None without one. Verifies this rank's share of the files."""
    manifest, layout = manifests.manifest(path), engine.optimizer.layout
    saved = (manifest or {}).get("tensor_parallel", 1)
    size = max(1, engine.autotp_size())
    if saved != size:
        raise CheckpointError(
            f"{path} was saved with tensor_parallel.autotp_size = {saved}, this engine "
            f"has {size}: ds_ext loads it on any number of ranks and at any ZeRO stage, but "
            "with the same autotp_size."
        )
    if manifest is not None:
        files = manifest["files"]
        manifests.verify(path, files, list(files)[layout.rank :: layout.world])
    return manifest


def _opened(contents: Contents, path: Path, manifest: Mapping[str, Any] | None) -> CheckpointData:
    """The memory-mapped files."""
    names = {own.name for own in contents.owned.values()}
    layers = pipeline.layer_names(contents.engine)
    return checkpoint_files.open_files(path, manifest, contents.layout.rank, names, layers)


def _check(contents: Contents, opened: CheckpointData, with_state: bool, strict: bool) -> None:
    """Raises CheckpointError if the checkpoint does not match the model or the optimizer."""
    if with_state:
        contents.check(opened.pieces, strict)
    else:
        checks.check_weights(opened.pieces, contents.owned, strict, contents.names)


def _load(contents: Contents, opened: CheckpointData, with_state: bool, path: Path) -> None:
    """Loads weights, buffers and, if ``with_state``, the optimizer's state."""
    contents.engine.optimizer.checkpoint_event_prologue()
    if with_state:
        contents.load(opened.pieces)
    else:
        contents.load_without_state(opened.pieces)
        kind = type(contents.optimizer).__name__
        log(f"{path}: only weights are loaded, the state of {kind} starts from zero")
    checkpoint_contents.load_buffers(contents.engine.module, opened.model)


def _publish(contents: Contents) -> None:
    """Sends loaded runs to the ranks that hold full parameters, if they have not read all."""
    layout = contents.layout
    layout.publish([p for p in layout.names if int8.find(p) is None])
    layout.end_step()


def _load_counts(engine: DeepSpeedEngine, opened: CheckpointData, with_scheduler: bool) -> None:
    """Loads step counts and schedules, even if a step's micro-batches are unfinished."""
    done, of = opened.saved[0]["accumulated"]["passes"] if opened.saved else (0, 1)
    checkpoint_contents.load_counts(engine, opened.model, (done, of), with_scheduler)
