"""Implements engine.save_checkpoint: all ranks save a checkpoint completely, or all raise.

1. Choose the folder, and create a temporary folder.
2. ``Contents.save`` and DeepSpeed's own code collect what to save.
3. Each rank writes its files, which DeepSpeed's tools can read, and computes checksums.
4. The first rank writes the manifest, and moves the files into place.

An error on one rank raises on every rank, at once, before an older checkpoint changes.
"""

import functools
import hashlib
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from deepspeed.runtime.engine import DeepSpeedEngine

from ds_ext.checkpoint import folder, manifests
from ds_ext.distributed import consensus
from ds_ext.distributed.groups import with_attribute
from ds_ext.engine import pipeline
from ds_ext.engine.checkpoint_contents import names_in
from ds_ext.engine.rank_logging import warn
from ds_ext.errors import CheckpointError

F = TypeVar("F", bound=Callable[..., Any])
LAYER_FILE = re.compile(r"layer_(\d+)-(?:.*-)?model_states\.pt")  # a layer of a PipelineModule


def raises_on_all_ranks(function: F) -> F:
    """Decorator of functions that all ranks call: an error on one rank is raised on all."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with consensus.announced(function.__name__):
            return consensus.run_on_all_ranks(lambda: function(*args, **kwargs))

    return cast(F, call)


@raises_on_all_ranks
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
    engine.optimizer.optimizer.refuse_exchanged()
    state = engine.optimizer.fused.state
    is_measured = bool(state.squares) and not state.kept
    if state.used_up or is_measured:
        raise RuntimeError(
            "save_checkpoint was called between backward and engine.step(): call it after the step."
        )
    if state.kept:
        warn(
            "save_checkpoint was called between the micro-batches of a step: a run that loads the "
            "checkpoint begins this step again. Call it after the step to lose no gradients"
        )
    pipeline.follow_groups(engine, engine.optimizer.optimizer)
    if not save_dir:
        raise ValueError(f"save_checkpoint: save_dir is {save_dir!r}; name a folder.")
    tag = common_tag(engine, tag)
    path = folder.checkpoint_path(
        save_dir, f"global_step{engine.global_steps}" if tag is None else tag
    )
    consensus.require_equal({"checkpoint path": str(path)})
    more = {
        "client_state": client_state or {},
        "exclude_frozen_parameters": exclude_frozen_parameters,
    }
    consensus.run_on_all_ranks(
        lambda: _save(engine, save_dir, path, save_latest, more),
        lambda text: CheckpointError(
            f"checkpoint {path} could not be saved. Earlier checkpoints are unchanged. {text}"
        ),
    )
    return True


def common_tag(engine: DeepSpeedEngine, tag: str | None) -> str | None:
    """Returns rank 0's tag. ``checkpoint.tag_validation`` decides whether tags may differ.

    Raises:
        ValueError: tags differ, and ``checkpoint.tag_validation`` is "Fail".
    """
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
    engine: DeepSpeedEngine, save_dir: str, path: Path, is_latest: bool, more: dict[str, Any]
) -> None:
    """Saves a checkpoint to ``path``, a folder in ``save_dir``."""
    draft = folder.prepare(path) if engine.global_rank == 0 else None

    def fill() -> None:
        (aside,) = filter(None, consensus.gathered(draft.aside if draft else None))
        writer = _write(engine, save_dir, aside, more)
        entries = _entries(writer, engine.global_rank)
        if draft is not None:  # on the first rank
            manifest = {
                "ds_ext": manifests.VERSION,
                "tag": str(path.relative_to(save_dir)),
                "global_steps": engine.global_steps,
                "optimizer": type(engine.optimizer.optimizer).__name__,
                "zero_stage": int(engine.zero_optimization_stage()),
                "ranks": engine.optimizer.layout.world,
                "tensor_parallel": max(1, engine.autotp_size()),
                **entries,
            }
            folder.commit(draft, manifest, is_latest)

    try:
        consensus.run_on_all_ranks(fill)
        engine.optimizer.checkpoint_event_epilogue()  # ZeRO-3 gathers weights: no rank has failed
    finally:
        if draft is not None:
            shutil.rmtree(draft.aside, ignore_errors=True)  # all ranks have stopped writing


def _write(engine: DeepSpeedEngine, save_dir: str, aside: Path, more: dict[str, Any]) -> "Writer":
    """Makes DeepSpeed write this rank's files into the folder ``aside``; returns their writer.

    Communicates nothing: in DeepSpeed's own ``save_checkpoint``, the other ranks would wait at a
    barrier for a rank that failed.
    """
    if not aside.is_dir():
        raise CheckpointError(f"{aside}: the folder must lie on a file system that all ranks share")
    name = str(aside.relative_to(save_dir) if aside.is_relative_to(save_dir) else aside)
    save_weights = engine._save_checkpoint
    if engine.has_moe_layers:
        engine.save_non_zero_checkpoint, save_weights = False, engine._save_moe_checkpoint
    engine.optimizer.checkpoint_event_prologue()
    writer = Writer(engine.checkpoint_engine)
    with with_attribute(engine, "checkpoint_engine", writer):
        save_weights(save_dir, name, **more)
        if engine.save_zero_checkpoint:
            engine._save_zero_checkpoint(save_dir, name)
    return writer


@dataclass
class Writer:
    """Replaces DeepSpeed's checkpoint engine during a save, to record the files of this rank."""

    inner: Any
    files: dict[str, dict[str, int]] = field(default_factory=dict)  # sizes and checksums by name
    # Of saved weights and states: ``names_in``.
    names: dict[str, Collection[str]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def save(self, state_dict: Any, path: str) -> None:
        """Writes a file. DeepSpeed calls it."""
        file = Path(path)
        self.names = names_in(state_dict) or self.names
        try:
            self.inner.save(state_dict, path)
        except Exception as error:
            free = shutil.disk_usage(file.parent).free / 2**20
            raise CheckpointError(
                f"{path} could not be written ({free:,.0f} MiB are free there): "
                f"{type(error).__name__}: {error}"
            ) from error
        self.files[file.name] = manifests.size_and_checksum(file)


def _entries(writer: Writer, rank: int) -> dict[str, Any]:
    """The manifest's entries for all ranks' files and names. All ranks call it."""
    written = consensus.gathered(writer.files)
    # Most ranks save the same names, and names of a large model are long: send each list once.
    own = {key: sorted(names) for key, names in writer.names.items()}
    hashes = consensus.gathered(hashlib.sha256(repr(own).encode()).hexdigest())
    lists = consensus.gathered(own if hashes.index(hashes[rank]) == rank else {})
    names = {key: {n for own in lists for n in own.get(key, ())} for key in ("weights", "state")}
    return {
        "model_files": [n for files in written for n in files if is_model_file(n)],
        "state_files": [n for files in written for n in files if _holds_state(n, files)],
        "layer_files": [n for files in written for n in files if LAYER_FILE.fullmatch(n)],
        "files": {n: f for files in written for n, f in files.items()},
        "names": {key: sorted(found) for key, found in names.items()},
    }


def is_model_file(name: str) -> bool:
    """Returns whether a file contains the model, rather than one expert or layer."""
    is_part = re.match(r"(layer_-?\d+_)?expert_\d+_", name) or LAYER_FILE.fullmatch(name)
    return name.endswith("model_states.pt") and not is_part


def _holds_state(name: str, files: Collection[str]) -> bool:
    """Whether a file contains optimizer state. Without optimizer files, model files do."""
    if any("optim_states" in other for other in files):
        return "optim_states" in name
    return not LAYER_FILE.fullmatch(name)
