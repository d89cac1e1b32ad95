"""engine.save_checkpoint and engine.load_checkpoint: DeepSpeed's files, complete or not there.

DeepSpeed's own code writes the files, so that its tools read them (zero_to_fp32.py). They are
written aside and moved into place when all ranks have written theirs, and verified before they are
read. Loading is ours: by any number of ranks, at any ZeRO stage.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from ds_ext import param_groups
from ds_ext.checkpoint import folder, resharding, swap
from ds_ext.checkpoint.names import by_plain_name, plain, with_plain_names
from ds_ext.checkpoint.resharding import Pieces, Saved
from ds_ext.distributed import consensus
from ds_ext.engine.adapter import ZeroAdapter, log
from ds_ext.errors import CheckpointError

# What DeepSpeed keeps of a run beside weights and optimizer; the rest of its file is the client's.
_COUNTS = ("global_steps", "global_samples", "skipped_steps")
_OWN = {
    *_COUNTS,
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd"),
    *(
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "checkpoint_parallel_dimensions",
    ),
}


class _Writer:
    """DeepSpeed's checkpoint engine while it saves: notes files, and errors instead of raising.

    A rank that raised would leave the others waiting in DeepSpeed's barriers.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.inner = engine.checkpoint_engine
        self.files: dict[str, dict[str, int]] = {}
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __enter__(self) -> "_Writer":
        self.engine.checkpoint_engine = self
        self.engine._copy_recovery_script = self._copy_recovery_script
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.checkpoint_engine = self.inner
        del self.engine._copy_recovery_script

    def save(self, state_dict: Any, path: str) -> None:
        self._try(self._save, state_dict, Path(path))

    def _save(self, state_dict: Any, path: Path) -> None:
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


def save_checkpoint(
    original: Callable[..., Any],
    engine: DeepSpeedEngine,
    save_dir: str,
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """DeepSpeed's, by ``original``; CheckpointError on every rank if one could not write."""
    adapter: ZeroAdapter = engine.optimizer
    adapter.check_complete()
    if not save_dir:
        raise ValueError(f"save_checkpoint: save_dir is {save_dir!r}; name a folder.")
    path = folder.path_of(save_dir, f"global_step{engine.global_steps}" if tag is None else tag)
    consensus.agree({"checkpoint path": str(path)})
    aside = folder.incomplete(path)

    def prepare() -> None:
        if engine.global_rank == 0:
            folder.prepare(path)

    def written() -> dict[str, dict[str, int]]:
        if writer.error is not None:
            raise writer.error
        return writer.files

    def commit() -> None:
        if engine.global_rank == 0:
            manifest = {
                "ds_ext": folder.VERSION,
                "tag": str(path.relative_to(save_dir)),
                "global_steps": engine.global_steps,
                "optimizer": type(adapter.optimizer).__name__,
                "zero_stage": int(engine.zero_optimization_stage()),
                "ranks": adapter.layout.world,
                "tensor_parallel": max(1, engine.autotp_size()),
                "model_files": [n for files in everyone for n in files if _is_model(n)],
                "state_files": [n for files in everyone for n in files if _holds_state(n, files)],
                "files": {n: f for files in everyone for n, f in files.items()},
            }
            folder.commit(path, manifest, save_latest)

    consensus.together(prepare, CheckpointError)
    try:
        with _Writer(engine) as writer:
            inside = aside.is_relative_to(save_dir)  # or beside what a link names
            name = str(aside.relative_to(save_dir) if inside else aside)
            original(
                engine, save_dir, name, dict(client_state or {}), False, exclude_frozen_parameters
            )
        everyone = consensus.gathered(consensus.together(written, CheckpointError))
        consensus.together(commit, CheckpointError)
    except CheckpointError as error:
        if engine.global_rank == 0:
            swap.discard(path)
        raise CheckpointError(
            f"checkpoint {path} could not be saved, the ones before it are as they were: {error}"
        ) from error
    return True


def _is_model(name: str) -> bool:
    """Whether a file is of the model's weights, and not of one expert's."""
    return name.endswith("model_states.pt") and not re.match(r"(layer_-?\d+_)?expert_\d+_", name)


def _holds_state(name: str, files: Mapping[str, Any]) -> bool:
    """Whether a rank's optimizer is in this file: in the model's, where there is no other."""
    return "optim_states" in name or not any("optim_states" in other for other in files)


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
    """As DeepSpeed's -> (path, client state); of any number of ranks, and from any stage.

    A checkpoint of DeepSpeed's own optimizers gives its weights alone. Raises CheckpointError on
    every rank, before anything is changed, for one that is damaged or of another run.
    """
    if custom_load_fn is not None:
        raise ValueError("load_checkpoint: ds_ext reads weights in pieces; remove custom_load_fn.")
    if tag is None:
        tag = consensus.together(lambda: folder.latest(Path(load_dir)), CheckpointError)
        seen = consensus.gathered(tag)
        if other := [rank for rank, found in enumerate(seen) if found != seen[0]]:
            raise CheckpointError(
                f"{load_dir}/latest is {seen[0]!r} on rank 0 and {seen[other[0]]!r} on rank "
                f"{other[0]}: name the full path of a folder on a file system that all ranks share."
            )
        if tag is None:
            log(f"there is no checkpoint in {load_dir}: nothing is loaded")
            return None, None
    folder.path_of(load_dir, tag)  # raises for what is no tag
    path = consensus.together(lambda: folder.find(Path(load_dir), str(tag)), CheckpointError)
    load = _Load(engine, path, load_module_strict)
    ours = consensus.together(load.verify, CheckpointError)
    consensus.together(load.open, CheckpointError)
    with_state = ours and load_optimizer_states and not load_module_only
    consensus.together(
        lambda: load.check(with_state), lambda text: CheckpointError(f"{path}: {text}")
    )
    consensus.together(lambda: load.weights_and_state(with_state), CheckpointError)
    engine.optimizer.publish_all()
    consensus.together(
        lambda: load.counts(load_lr_scheduler_states, load_module_only), CheckpointError
    )
    return str(path), load.client_state()


class _Load:
    """One load of a checkpoint into an engine, in steps that all ranks take together."""

    def __init__(self, engine: DeepSpeedEngine, path: Path, strict: bool) -> None:
        self.engine = engine
        self.path = path
        self.strict = strict
        self.adapter: ZeroAdapter = engine.optimizer
        self.saved: list[Saved] = []  # by rank, of our optimizers

    def verify(self) -> bool:
        """Verifies this rank's share of the files -> whether ds_ext wrote them."""
        self.manifest = folder.manifest(self.path)
        saved = (self.manifest or {}).get("tensor_parallel", 1)
        size = max(1, self.engine.autotp_size())
        if saved != size:
            raise CheckpointError(
                f"{self.path} was saved with tensor_parallel.autotp_size = {saved}, this engine "
                f"has {size}: ds_ext loads it on any number of ranks and at any ZeRO stage, but "
                "with the same autotp_size."
            )
        if self.manifest is not None:
            files, layout = self.manifest["files"], self.adapter.layout
            folder.verify(self.path, files, list(files)[layout.rank :: layout.world])
        return self.manifest is not None

    def open(self) -> None:
        """Maps the files."""
        names = sorted(f.name for f in self.path.glob("*.pt") if _is_model(f.name))
        if self.manifest is not None:
            names = self.manifest["model_files"]
            for name in self.manifest["state_files"]:
                found = _map(self.path / name, is_plain="optim_states" in name)
                own = found.get("optimizer_state_dict") or found["optimizer"]
                self.saved.append(with_plain_names(own))
        if not names:
            raise CheckpointError(f"{self.path} holds no checkpoint: no file *model_states.pt.")
        models = [_map(self.path / name) for name in names]
        if self.manifest is None:
            self._refuse_unfinished(models[0].get("optimizer"))
        self.model = models[self.adapter.layout.rank % len(models)]
        self.pieces = Pieces([*self.saved, *self._weights_of(models, names)])

    def _refuse_unfinished(self, optimizer: Any) -> None:
        """Raises CheckpointError if ds_ext wrote these files after all."""
        files = [_map(file) for file in self.path.glob("*_rank_0_*optim_states.pt")]
        optimizers = [optimizer, *(file["optimizer_state_dict"] for file in files)]
        if any(isinstance(o, dict) and "ds_ext" in o for o in optimizers):
            raise CheckpointError(f"{self.path} is not complete: {folder.MANIFEST} is missing.")

    def _weights_of(self, models: list[Any], names: list[str]) -> Iterator[Saved]:
        """Pieces of weights that lie in DeepSpeed's own files: frozen ones, or all of them."""
        known = {name for saved in self.saved for name in saved["weights"]}
        wanted = {own.name for own in self.adapter.owned().values()} - known
        if not names[0].startswith("zero_pp_rank_"):  # the weights are whole
            yield {"weights": _pieces(models[0]["module"], wanted, 0)}
        elif self.saved:
            for rank, model in enumerate(models):
                shapes = model["frozen_param_shapes"] or {}
                yield {
                    "weights": _pieces(model["frozen_param_fragments"] or {}, wanted, rank, shapes)
                }
        else:
            folders = str(self.path.parent), self.path.name
            whole = get_fp32_state_dict_from_zero_checkpoint(*folders, lazy_mode=True)
            yield {"weights": _pieces(whole, wanted, 0)}

    def check(self, with_state: bool) -> None:
        """Raises CheckpointError for what does not fit the model or the optimizer."""
        owned = self.adapter.owned()
        if with_state:
            resharding.check(self.pieces, self.adapter.optimizer, owned, self.strict)
            self.adapter.check_accumulated(self.pieces)
        else:
            resharding.check_weights(self.pieces, owned, self.strict)

    def weights_and_state(self, with_state: bool) -> None:
        adapter = self.adapter
        adapter.checkpoint_event_prologue()
        if with_state:
            resharding.load_state(self.pieces, adapter.optimizer, adapter.owned())
            adapter.restore(self.pieces)
        else:
            adapter.optimizer.state.clear()
            adapter.fused.begin_with({})
            kind = type(adapter.optimizer).__name__
            log(f"{self.path}: weights are taken, the state of {kind} starts anew")
        missing = resharding.load_weights(self.pieces, adapter.optimizer, adapter.owned())
        if missing:
            log(f"not in the checkpoint, left as they were: {param_groups.summary(missing)}")
        self._load_buffers()

    def _load_buffers(self) -> None:
        """Puts back what the model's state dict has beside parameters."""
        module = self.engine.module
        params = {plain(name) for name, _ in module.named_parameters(remove_duplicate=False)}
        own_names = {plain(name): name for name in module.state_dict()}
        saved = by_plain_name(self.model["module"]).items()
        buffers = {own_names.get(k, k): v for k, v in saved if k not in params}
        module.load_state_dict(buffers, strict=False)

    def counts(self, with_scheduler: bool, module_only: bool) -> None:
        """Puts back what DeepSpeed itself keeps: steps, schedules, the order of samples."""
        engine, saved = self.engine, self.model
        if module_only:
            return
        if with_scheduler and engine.lr_scheduler is not None and saved.get("lr_scheduler"):
            engine.lr_scheduler.load_state_dict(saved["lr_scheduler"])
        if engine.random_ltd_enabled() and saved.get("random_ltd"):
            engine.random_ltd_scheduler.load_state_dict(saved["random_ltd"])
        if saved.get("data_sampler") and engine.training_dataloader is not None:
            engine.training_dataloader.data_sampler.load_state_dict(saved["data_sampler"])
        for name in _COUNTS:
            setattr(engine, name, saved[name])
        passes = self.saved[0]["accumulated"]["passes"] if self.saved else (0, 1)
        steps = engine.gradient_accumulation_steps()
        engine.micro_steps = engine.global_steps * steps + passes[0] * steps // passes[1]

    def client_state(self) -> dict[str, Any]:
        return {key: value for key, value in self.model.items() if key not in _OWN}


def _pieces(
    found: Mapping[str, Any],
    wanted: set[str],
    rank: int,
    shapes: Mapping[str, torch.Size] | None = None,
) -> dict[str, Any]:
    """Pieces of the tensors of a rank, by plain name.

    ``shapes``, under the names of ``found``, are given if the rank has parts of them.
    """
    made = {}
    own_names = {plain(name): name for name in found}
    for name in wanted & own_names.keys():
        values = found[own_names[name]]
        shape = (shapes or {}).get(own_names[name], values.shape)
        total, size = shape.numel(), values.shape.numel()
        if shapes is not None:
            values = values.reshape(-1)[: max(total - rank * size, 0)]
        made[name] = {
            "start": min(rank * size, total),
            "total": total,
            "values": values,
            "shape": list(shape),
        }
    return made


def _map(path: Path, is_plain: bool = False) -> Any:
    """What torch.save wrote, its tensors left on the disk until they are read.

    ``is_plain``: there are only tensors and numbers in it, nothing that the client or DeepSpeed
    put there.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=is_plain)
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
