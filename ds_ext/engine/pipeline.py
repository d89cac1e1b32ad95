"""Supports DeepSpeed's PipelineModule: names, param groups and layout of a pipeline stage.

A layer's name contains its number in the whole model, so names do not depend on the number of
stages. The stages that have a ``TiedLayerSpec`` share all its parameters, as in a single process.
DeepSpeed itself ties only the parameters in ``tied_weight_attr``. Param groups are created for the
whole model, with empty placeholders for the parameters of other stages.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from ds_ext.checkpoint.pieces import plain_name
from ds_ext.distributed import consensus
from ds_ext.distributed.groups import Group, size_of
from ds_ext.distributed.layout import ParamInfo
from ds_ext.distributed.pipeline_layout import PipelineLayout, Tie
from ds_ext.distributed.placement import Placement
from ds_ext.optimizer import RuleOptimizer
from ds_ext.optimizer.model_view import ModelView, ParamView
from ds_ext.optimizer.param_table import ParamGroup

_TIED = "tied_modules."  # the prefix of tied parameters


def is_pipeline(engine: DeepSpeedEngine) -> bool:
    """Returns whether an engine's model is a PipelineModule."""
    return isinstance(engine.module, PipelineModule)


def check_supported(engine: DeepSpeedEngine) -> None:
    """Checks that ds_ext can train an engine's PipelineModule.

    Raises:
        ValueError: it cannot. The message names the unsupported setting.
    """
    if any(kind.__name__ == "DualPipeVModule" for kind in type(engine.module).__mro__):
        raise ValueError(
            "ds_ext does not support DualPipeVModule, which puts two stages on each rank: use "
            "PipelineModule."
        )
    stage = int(engine.zero_optimization_stage())
    if stage > 1:
        raise ValueError(
            f"zero_optimization.stage = {stage}: DeepSpeed's PipelineModule takes stage 0 or 1."
        )
    others = {
        'a "model" axis of its topology': engine.module.topology().get_dim("model") > 1,
        "tensor_parallel.autotp_size": engine.autotp_size() > 1,
        "sequence_parallel_size": engine.sequence_parallel_size > 1,
        "experts that are spread over ranks": engine.has_moe_layers,
    }
    if asked := [name for name, is_asked in others.items() if is_asked]:
        raise ValueError(f"ds_ext does not support PipelineModule with {asked[0]} yet: remove it.")


def gradients_kept_for(engine: DeepSpeedEngine) -> str:
    """Returns the feature that needs gradients kept until the step: "PipelineModule" or ""."""
    return "PipelineModule" if is_pipeline(engine) else ""


# Param groups.


def whole_model(own: ModelView) -> ModelView:
    """Returns the view of the whole model, from that of each stage. All ranks must call it.

    Parameters of other stages are empty placeholders.
    """
    params = {info.name: p for p, info in own.items()}
    everyone = consensus.gathered(list(own.values()))
    found = {info.name: info for of_rank in everyone for info in of_rank}
    whole: dict[Tensor, ParamView] = {}
    for name in in_order(found):
        param = params.get(name)
        if param is None:
            absent = torch.empty(0, dtype=torch.float32, device="meta")
            param = nn.Parameter(absent, found[name].is_trained)
        whole[param] = found[name]
    return whole


def in_order(names: Iterable[str]) -> list[str]:
    """Returns the unique names of all stages in a single stage's order: tied parameters first."""
    return sorted(dict.fromkeys(names), key=lambda name: not name.startswith(_TIED))


def gather_params(model: ModelView, params: Sequence[Any]) -> list[Any]:
    """Returns the parameters or groups of all stages. All ranks must call it.

    Raises:
        ValueError: groups of the stages differ in more than their parameters.
    """
    names = {p: info.name for p, info in model.items()}
    by_name = {name: p for p, name in names.items()}
    groups = [x for x in params if isinstance(x, dict)]
    others = [x for x in params if not isinstance(x, dict)]
    keys = [_keys(group) for group in groups]
    given = [*(list(group["params"]) for group in groups), others]
    error = (
        "the stages of a PipelineModule were given different param groups: give each the same "
        "groups, with its own parameters, or let optimizer.params.param_groups make them."
    )
    merged = _merged(keys, given, names, error)
    *of_groups, rest = [[by_name[name] for name in some] for some in merged]
    made = [{**own, "params": some} for own, some in zip(keys, of_groups, strict=True)]
    return [*made, *rest]


def _keys(group: ParamGroup) -> dict[str, Any]:
    """A group without its parameters. The order of keys is equal on all ranks."""
    return {key: group[key] for key in sorted(group.keys() - {"params"})}


def _merged(
    keys: list[dict[str, Any]], params: list[list[Tensor]], names: Mapping[Tensor, str], error: str
) -> list[list[str]]:
    """Each group's parameter names on all stages.

    Raises ValueError on all ranks: ``error`` if the stages have different ``keys``, or if a
    parameter is not in ``names``.
    """

    def named() -> list[list[str]]:
        if any(p not in names for some in params for p in some):
            raise ValueError("a parameter to be stepped is not part of the PipelineModule.")
        return [[names[p] for p in some] for some in params]

    everyone = consensus.gathered((repr(keys), consensus.run_on_all_ranks(named, ValueError)))
    if len({theirs for theirs, _ in everyone}) > 1:
        raise ValueError(error)
    of_groups = zip(*(own for _, own in everyone), strict=True)
    return [in_order(itertools.chain(*some)) for some in of_groups]


def number_parameters(
    engine: DeepSpeedEngine, optimizer: RuleOptimizer, may_differ: bool = False
) -> None:
    """Numbers parameters as in a pipeline with one stage. All ranks must call it.

    Does nothing without a pipeline. ``may_differ`` allows hyper-parameters of groups to differ.

    Raises:
        ValueError: the stages have different param groups.
    """
    if not is_pipeline(engine):
        return
    groups = optimizer.param_groups
    names = {p: plain_name(name) for p, name in engine.param_names.items()}
    keys = [{} if may_differ else _keys(group) for group in groups]
    error = (
        "the stages of a PipelineModule have optimizers with different param groups: name the "
        'optimizer in the config ("optimizer": {"type": ...}), which makes the same for all.'
    )
    merged = _merged(keys, [group["params"] for group in groups], names, error)
    optimizer.number_among(names, merged)


def follow_groups(engine: DeepSpeedEngine, optimizer: RuleOptimizer) -> None:
    """Applies edits of ``param_groups`` since the last step. All ranks must call it.

    Raises:
        ValueError: on all ranks, if a new parameter cannot be stepped or pipeline stages have
            different numbers of groups.
    """
    consensus.run_on_all_ranks(optimizer.follow_groups, ValueError)
    number_parameters(engine, optimizer, may_differ=True)


# The layout.


def layout_of(engine: DeepSpeedEngine, kind: Callable[[Group], Placement]) -> PipelineLayout:
    """Returns the layout of this rank's stage; ``kind`` makes the placement of its ranks."""
    group: Group = engine.seq_data_parallel_group
    names: Mapping[Tensor, str] = engine.param_names
    # Tied layers that are also on other stages, in the same order on all ranks.
    ties = [
        Tie(tied["group"], list(tied["module"].parameters()))
        for tied in engine.module.tied_comms.values()
        if dist.get_world_size(tied["group"]) > 1
    ]
    stages_of = {p: size_of(tie.group) for tie in ties for p in tie.params}

    @functools.cache
    def placement(stages: int) -> Placement:
        made = kind(group)
        made.num_replicas *= stages
        return made

    return PipelineLayout(
        group,
        names,
        lambda param: placement(stages_of.get(param, 1)),
        _weights(names, engine.module.stage_id),
        ties,
        engine.device,
    )


def _weights(names: Mapping[Tensor, str], stage: int) -> list[ParamInfo]:
    """The parameters of all stages.

    Raises ValueError on all ranks if an untied parameter is on several stages, or if a tied
    parameter differs between stages.
    """
    own = [(ParamInfo(name, p.numel(), p.dtype), p.requires_grad) for p, name in names.items()]
    found: dict[str, tuple[int, tuple[ParamInfo, bool]]] = {}
    everyone = consensus.gathered((stage, own))
    for there, info in ((there, info) for there, of_rank in everyone for info in of_rank):
        name = info[0].name
        first, known = found.setdefault(name, (there, info))
        if first != there and not name.startswith(_TIED):
            raise ValueError(
                f"{name} is on several stages and not tied: put it into a layer, or a "
                "TiedLayerSpec."
            )
        if known != info:
            raise ValueError(
                f"{name} is tied, and its stages differ in its size, dtype or requires_grad: make "
                "them alike."
            )
    return [found[name][1][0] for name in in_order(found)]


# Files.


def layer_names(engine: DeepSpeedEngine) -> dict[int, str]:
    """Returns the prefix of parameter names by layer number; {} without a PipelineModule."""
    specs = enumerate(engine.module._layer_specs if is_pipeline(engine) else ())
    return {
        i: f"{_TIED}{spec.key}." if isinstance(spec, TiedLayerSpec) else f"{i}."
        for i, spec in specs
    }
