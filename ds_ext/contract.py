"""Versions of other packages, and the private names of theirs that ds_ext relies on.

Importing this module checks the version of torch.

``contract.json`` holds the names that exist in the supported versions, with the parameters of
functions and hashes of their source. It has a name for each row of ``TABLE`` and each patch. With
these versions, or older ones, nothing is checked, because tests run with them. With a newer one,
``check`` finds names that are missing or take other arguments. ``make contract`` compares all names
with the installed versions.
"""

import functools
import importlib.metadata
import inspect
import json
import os
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import torch

from ds_ext import logs

LOWEST_TORCH = (2, 6)
LOWEST_DEEPSPEED = (0, 19, 8)
SWITCH = "DS_EXT_ANY_DEEPSPEED"  # set to 1 to go on with a version that fails the check
RECORDS = Path(__file__).with_suffix(".json")

# "NAME": why, by module. "CLASS.NAME" is a method or class attribute, and "CLASS@NAME" an attribute
# that the module's source assigns or reads. Patched methods are not listed: their patches say why.
TABLE: dict[str, dict[str, str]] = {
    "deepspeed.runtime.engine": {
        "DeepSpeedEngine._save_checkpoint": "writes the weights of a checkpoint",
        "DeepSpeedEngine._save_moe_checkpoint": "the same for models with DeepSpeed's experts",
        "DeepSpeedEngine._save_zero_checkpoint": "writes the optimizer's state",
        "DeepSpeedEngine@save_zero_checkpoint": "whether this rank writes that state",
        "DeepSpeedEngine@save_non_zero_checkpoint": "whether this rank writes the weights",
        "DeepSpeedEngine@checkpoint_engine": "is replaced during a save, to record files",
        "DeepSpeedEngine@_config": "the parsed config; its gradient_clipping is set to 0",
        "DeepSpeedEngine@_running_engine_backward": "whether engine.backward scaled the loss",
        "DeepSpeedEngine@_manual_backward_expected": "whether engine.scale scaled the loss",
        "DeepSpeedEngine@module_forward_pre_hook": "is removed with the engine",
        "DeepSpeedEngine@module_forward_post_hook": "is removed with the engine",
        "DeepSpeedEngine@inside_no_sync_ctxt": "whether gradients accumulate without a step",
        "DeepSpeedEngine@param_names": "names in checkpoints",
    },
    "deepspeed.runtime.pipe.module": {
        "PipelineModule@_layer_specs": "names of layers in checkpoints",
        "PipelineModule@tied_comms": "which layers are tied over stages",
    },
    "deepspeed.runtime.config": {
        "DEEPSPEED_OPTIMIZERS": "names that a config's type may have",
        "DeepSpeedConfig@_param_dict": "the config as given",
        "DeepSpeedConfig._configure_train_batch_size": "checks batch sizes for any number of ranks",
    },
    "deepspeed.runtime.base_optimizer": {
        "ZeROOptimizer.enter_backward": "begins a backward pass",
        "ZeROOptimizer.exit_backward": "ends a backward pass",
        "ZeROOptimizer.clear_backward_seen_flag": "forgets an abandoned backward pass",
        "ZeROOptimizer.queue_post_backward_callback": "queues the end of a backward pass",
        "ZeROOptimizer@_backward_hook_state": "the state of a backward pass",
        "BackwardHookStateManager@_grad_acc_post_hooks": "hooks that the measuring pass suspends",
        "BackwardHookStateManager@post_backward_callback_queued": "is reset after that pass",
        "BackwardHookStateManager@backward_active_depth": "is reset after a failed pass",
    },
    "deepspeed.runtime.zero.parameter_offload": {
        "FWD_MODULE_STACK": "keeps models alive, so it holds ours weakly",
        "DeepSpeedZeRoOffload.__init__": "partitions and gathers the parameters at stage 3",
        "DeepSpeedZeRoOffload.empty_partition_cache": "partitions what is gathered",
        "DeepSpeedZeRoOffload.partition_all_parameters": "partitions parameters after a step",
        "DeepSpeedZeRoOffload.get_param_coordinator": "orders the gathers",
        "DeepSpeedZeRoOffload@persistent_parameters": "are gathered after a step",
        "DeepSpeedZeRoOffload@applied_pre_backward_ref_cnt": "is restored after the measuring pass",
        "DeepSpeedZeRoOffload@ds_grads_remaining": "is restored after the measuring pass",
    },
    "deepspeed.runtime.zero.partitioned_param_coordinator": {
        "PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release": (
            "has a cache that keeps models alive"
        ),
        "PartitionedParameterCoordinator.release_sub_module": "also releases frozen parameters",
        "PartitionedParameterCoordinator@ds_active_sub_modules": "what keeps a parameter gathered",
        "iter_params": "the parameters that a module's hooks gather",
    },
    "deepspeed.runtime.zero.partition_parameters": {
        "Init@ds_tensor": "this rank's run of a parameter",
        "Init@ds_shape": "the shape of the whole parameter",
        "Init@ds_status": "whether a parameter is gathered",
        "Init@ds_process_group": "the ranks that share a parameter",
        "Init@ds_persist": "whether a parameter stays gathered",
        "Init@ds_secondary_tensor": "hpZ's copy, which an update makes stale",
        "MultipleAllGatherHandles": "the handle of a gather of weights in 8 bits",
        "ZeroParamStatus": "values of ds_status",
    },
    "deepspeed.runtime.fp16.loss_scaler": {
        "CreateLossScaler": "makes the loss scaler",
        "LossScalerBase.scale_loss": "scales a loss",
        "DynamicLossScaler.update_scale": "follows overflows",
    },
    "deepspeed.runtime.torch_autocast": {"get_comm_dtype": "the dtype of reductions"},
    "deepspeed.runtime.lr_schedules": {"VALID_LR_SCHEDULES": "names of schedulers"},
    "deepspeed.utils.groups": {
        "_get_sequence_parallel_group": "ranks that share sequences",
        "_get_expert_parallel_rank": "the number of this rank's first expert",
        "_get_expert_parallel_group_dict": "groups of experts",
        "_get_expert_data_parallel_group": "ranks that hold the same experts",
        "_create_zero_param_parallel_group": "ranks that share hpZ's copies",
        "_get_zero_param_intra_parallel_group": "ranks that share hpZ's copies",
    },
    "torch": {
        "_C._current_graph_task_id": "which backward pass runs",
        "_C._will_engine_execute_node": "which parameters a backward pass reaches",
        "jit._recursive.get_hook_stubs": "leaves our hooks out of scripted modules",
    },
    "torch.utils._pytree": {
        "tree_flatten": "finds the tensors in arguments of modules",
        "tree_unflatten": "puts pieces of them into arguments again",
    },
    "torch.distributed.distributed_c10d": {
        "_get_default_store": "ranks announce in it that they save",
        "_hash_ranks_to_str": "names groups, alike on all ranks",
        "_set_pg_timeout": "gives our groups the timeout of DeepSpeed's",
        "_world": "which groups still exist",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_state": {
        "FSDPState@_fsdp_param_groups": "the groups of parameters of a unit",
        "FSDPState@_training_state": "is reset for a call in backward",
    },
    "torch.distributed.fsdp._fully_shard._fully_shard": {
        "FSDPModule._get_fsdp_state": "the state of a unit",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param": {
        "FSDPParam@_unsharded_param": "the leaf of a graph for a sharded parameter",
        "FSDPParam@unsharded_accumulated_grad": "gradients that are not reduced yet",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": {
        "FSDPParamGroup@fsdp_params": "the parameters of a group",
        "FSDPParamGroup@_training_state": "whether a group's gradients are reduced",
        "FSDPParamGroup@_partial_reduce_output": "gradients that are reduced within a replica only",
    },
    "transformers.trainer_callback": {
        "CallbackHandler@callbacks": "the order in which callbacks see metrics",
    },
    "accelerate.state": {"PartialState@_shared_state": "whether ranks see each other on CPUs"},
}


def numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version without its build tag: "2.13.0+cpu" -> (2, 13, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def written(version: tuple[int, ...]) -> str:
    """Returns a version as text: (2, 6) -> "2.6"."""
    return ".".join(map(str, version))


def check_torch(version: str) -> None:
    """Checks the version of torch.

    Raises:
        ImportError: the version is too old. The message is one sentence.
    """
    if numbers(version) < LOWEST_TORCH:
        raise ImportError(
            f"ds_ext needs torch {written(LOWEST_TORCH)} or newer, and {version} is installed."
        )


def check_deepspeed(version: str) -> None:
    """Checks the version of DeepSpeed.

    Raises:
        ImportError: the version is too old. The message is one sentence.
    """
    if numbers(version) < LOWEST_DEEPSPEED:
        lowest = written(LOWEST_DEEPSPEED)
        raise ImportError(
            f"ds_ext works with DeepSpeed {lowest} and newer, and {version} is installed: "
            f'pip install "deepspeed>={lowest}", or train without DeepSpeed: call '
            "ds_ext.fuse_into_backward."
        )


@functools.cache
def records() -> dict[str, Any]:
    """Returns the supported versions by package, and what is recorded of each name."""
    return json.loads(RECORDS.read_text())  # type: ignore[no-any-return]


@functools.cache
def check(*packages: str) -> None:
    """Checks packages that are newer than the supported versions, and warns of them once.

    Raises:
        RuntimeError: names are missing or take other arguments, and ``DS_EXT_ANY_DEEPSPEED`` is
            not 1. The message names them, and the versions that work.
    """
    supported = records()["versions"]
    installed = {package: _version(package) for package in packages}
    newer = {p: v for p, v in installed.items() if numbers(v) > numbers(supported[p])}
    problems = [problem for package in newer for problem in broken(package)]
    have = ", ".join(f"{package} {version}" for package, version in newer.items())
    works = " ".join(f'"{package}<={supported[package]}"' for package in newer)
    if problems and os.environ.get(SWITCH) != "1":
        raise RuntimeError(
            f"ds_ext does not know {have}: {'; '.join(problems)}: pip install {works}, or set "
            f"{SWITCH}=1 to try this version all the same."
        )
    if newer and os.environ.get("RANK", "0") == "0":
        logs.show_by_default()
        logs.logger.warning(f"ds_ext was not tested with {have}; it was tested with {works}")


def _version(package: str) -> str:
    """The version of an installed package, or of a checkout on the path."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(pkgutil.resolve_name(f"{package}:__version__"))


def broken(package: str) -> list[str]:
    """Returns the recorded names of a package that are missing or take other arguments.

    A new argument that has a default is no difference.
    """
    told = []
    for name, recorded in records()["names"].items():
        if name.partition(":")[0].partition(".")[0] == package:
            try:
                new, old = parameters(resolve(name)), recorded.get("parameters")
            except (ImportError, AttributeError):
                told.append(f"{name} is missing")
                continue
            if old is not None and not accepts((new or "").split(", "), old.split(", ")):
                told.append(f"{name} takes ({new})")
    return told


def resolve(name: str) -> Any:
    """Returns what a name stands for; None for "CLASS@NAME".

    Raises:
        ImportError: there is no such module.
        AttributeError: it has no such name.
    """
    name, _, attribute = name.partition("@")
    value = pkgutil.resolve_name(name)
    if attribute:
        source = Path(str(sys.modules[value.__module__].__file__)).read_text()
        if not re.search(rf"\b{attribute}\b", source):
            raise AttributeError(attribute)
        return None
    return inspect.unwrap(value) if callable(value) else value


def parameters(value: Any) -> str | None:
    """Returns the parameters of a function or class, as in "self, given=, **more"; else None."""
    if not inspect.isfunction(value) and not (inspect.isclass(value) and "__init__" in vars(value)):
        return None
    stars: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    found = inspect.signature(value).parameters.values()
    return ", ".join(
        stars.get(p.kind, "") + p.name + "=" * (p.default is not p.empty) for p in found
    )


def accepts(new: list[str], old: list[str]) -> bool:
    """Returns whether a function still takes its old parameters, and needs no others."""
    return new[: len(old)] == old and all(p.endswith("=") or p[0] == "*" for p in new[len(old) :])


check_torch(torch.__version__)
