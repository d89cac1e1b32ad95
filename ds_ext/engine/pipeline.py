"""DeepSpeed's PipelineModule: what a stage, which has some of the layers, knows of the others.

Layers are named by their number among all layers, so that names do not depend on the stages. All
parameters of a ``TiedLayerSpec`` are one on all stages that have it, as they are in one process;
DeepSpeed ties those alone that ``tied_weight_attr`` names. Param groups are made of the whole
model: parameters of other stages have stand-ins without memory.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from ds_ext.checkpoint.names import plain
from ds_ext.distributed import consensus
from ds_ext.distributed.layout import Weight
from ds_ext.distributed.placement import Group, Placement, size_of
from ds_ext.distributed.stages import Stage, Tie
from ds_ext.engine import copies, versions
from ds_ext.optimizer import RuleOptimizer
from ds_ext.optimizer.model_view import ModelView
from ds_ext.optimizer.param_groups import ParamGroup

T = TypeVar("T")
_TIED = "tied_modules."  # what names of tied parameters begin with


def is_pipeline(engine: DeepSpeedEngine) -> bool:
    """Returns whether an engine's model is divided into stages."""
    return isinstance(engine.module, PipelineModule)


def refuse(engine: DeepSpeedEngine) -> None:
    """Checks that ds_ext can train an engine's PipelineModule.

    Raises:
        ValueError: naming what excludes it.
    """
    versions.refuse_old_pipelines()
    if any(kind.__name__ == "DualPipeVModule" for kind in type(engine.module).__mro__):
        raise ValueError(
            "ds_ext does not support DualPipeVModule, two stages of which lie on each rank: use "
            "PipelineModule."
        )
    stage = int(engine.zero_optimization_stage())
    if stage > 1:
        raise ValueError(
            f"zero_optimization.stage = {stage}: DeepSpeed's PipelineModule takes stage 0 or 1."
        )
    others = {
        copies.KEY: bool(copies.shard_size(engine.config)),
        'a "model" axis of its topology': engine.module.topology().get_dim("model") > 1,
        "tensor_parallel.autotp_size": engine.autotp_size() > 1,
        "sequence_parallel_size": engine.sequence_parallel_size > 1,
        "experts that are spread over ranks": engine.has_moe_layers,
    }
    if asked := [name for name, is_asked in others.items() if is_asked]:
        raise ValueError(f"ds_ext does not support PipelineModule with {asked[0]} yet: remove it.")


def keeps(engine: DeepSpeedEngine) -> str:
    """Returns what needs gradients to be kept until the step, by name; "" if nothing does."""
    return "PipelineModule" if is_pipeline(engine) else ""


def on_all_stages(engine: DeepSpeedEngine, action: Callable[[], T]) -> T:
    """Returns what ``action`` returns. All ranks of a pipeline call it.

    Args:
        engine: of any model.
        action: what may fail on one stage alone. It has no collectives.

    Raises:
        ValueError: on the ranks of all stages, if it fails on one.
    """
    return consensus.together(action, ValueError) if is_pipeline(engine) else action()


# Param groups.


class Told(NamedTuple):
    """What a stage tells of one of its parameters."""

    name: str
    is_trained: bool
    dims: int
    decays: bool
    role: str


@dataclass(frozen=True)
class WholeModel(ModelView):
    """The parameters of all stages: this one's own, and stand-ins for the others'."""

    told: Mapping[Tensor, Told] = field(default_factory=dict)

    @property
    def names(self) -> dict[Tensor, str]:
        """The name of each parameter."""
        return {p: told.name for p, told in self.told.items()}

    @functools.cached_property
    def owners(self) -> dict[Tensor, tuple[str, nn.Module]]:
        """The name of each parameter; for a module of another stage stands the model."""
        return {p: (name, self.module) for p, name in self.names.items()}

    def dims(self, param: Tensor) -> int:
        """The dimensions of a parameter, of one expert where it stacks them."""
        return self.told[param].dims

    def decays(self, param: Tensor) -> bool:
        """Whether weight decay is for a parameter."""
        return self.told[param].decays

    def role(self, param: Tensor) -> str:
        """What a parameter is: see ``ModelView``."""
        return self.told[param].role


def whole_model(own: ModelView) -> WholeModel:
    """Returns the view of a model of which this rank has a stage. All ranks call it.

    Args:
        own: the view of the stage.
    """
    params = {name: p for p, (name, _) in own.owners.items()}
    mine = [
        Told(name, p.requires_grad, own.dims(p), own.decays(p), own.role(p))
        for name, p in params.items()
    ]
    found = {told.name: told for of_rank in consensus.gathered(mine) for told in of_rank}
    told_of: dict[Tensor, Told] = {}
    for name in in_order([list(found)]):
        param = params.get(name)
        if param is None:
            absent = torch.empty(0, dtype=torch.float32, device="meta")
            param = nn.Parameter(absent, found[name].is_trained)
        told_of[param] = found[name]
    return WholeModel(own.module, own.linears, own.embeddings, own.shape, told_of)


def in_order(names: Sequence[Sequence[str]]) -> list[str]:
    """Returns the names that stages have, each once, as one stage would have them: tied first."""
    found = dict.fromkeys(name for some in names for name in some)
    return sorted(found, key=lambda name: not name.startswith(_TIED))


def whole_params(model: WholeModel, params: Sequence[Any]) -> list[Any]:
    """Returns what is to be stepped on any stage. All ranks call it.

    Args:
        model: of all stages.
        params: parameters of this one, or groups of them, alike on all stages but for these.

    Raises:
        ValueError: the stages have different groups.
    """
    by_name = {told.name: p for p, told in model.told.items()}
    groups = [x for x in params if isinstance(x, dict)]
    others = [x for x in params if not isinstance(x, dict)]
    keys = [_keys(group) for group in groups]
    given = [*(list(group["params"]) for group in groups), others]
    merged = _merged(keys, given, model.names)
    if merged is None:
        raise ValueError(
            "the stages of a PipelineModule were given different param groups: give each the same "
            "groups, with its own parameters, or let optimizer.params.param_groups make them."
        )
    *of_groups, rest = [[by_name[name] for name in some] for some in merged]
    made = [{**own, "params": some} for own, some in zip(keys, of_groups, strict=True)]
    return [*made, *rest]


def _keys(group: ParamGroup) -> dict[str, Any]:
    """What a group has beside its parameters, in the same order on all ranks."""
    return {key: group[key] for key in sorted(group.keys() - {"params"})}


def _merged(
    keys: list[dict[str, Any]], params: list[list[Tensor]], names: Mapping[Tensor, str]
) -> list[list[str]] | None:
    """The names of each group on all stages; None if these have different keys.

    Raises ValueError on all ranks for a parameter that is not among ``names``.
    """

    def named() -> list[list[str]]:
        if any(p not in names for some in params for p in some):
            raise ValueError("a parameter to be stepped is not part of the PipelineModule.")
        return [[names[p] for p in some] for some in params]

    everyone = consensus.gathered((repr(keys), consensus.together(named, ValueError)))
    if len({theirs for theirs, _ in everyone}) > 1:
        return None
    return [in_order(some) for some in zip(*(own for _, own in everyone), strict=True)]


def of_stage(groups: Sequence[ParamGroup]) -> list[ParamGroup]:
    """Returns groups of a whole model with the parameters of this stage, of which may be none."""
    return [{**g, "params": [p for p in g["params"] if not p.is_meta]} for g in groups]


def keep_groups(engine: DeepSpeedEngine, optimizer: RuleOptimizer) -> None:
    """Notes groups of which this stage may have no parameters: DeepSpeed takes them out."""
    if is_pipeline(engine):
        _groups[optimizer] = list(optimizer.param_groups)


def put_groups_back(optimizer: RuleOptimizer) -> None:
    """Makes the groups those that ``keep_groups`` has noted, if it has noted any."""
    if optimizer in _groups:
        optimizer.param_groups[:] = _groups.pop(optimizer)


_groups: WeakKeyDictionary[RuleOptimizer, list[ParamGroup]] = WeakKeyDictionary()


def number(engine: DeepSpeedEngine, optimizer: RuleOptimizer) -> None:
    """Gives parameters the numbers that they would have on one stage. All ranks call it.

    Raises:
        ValueError: the stages have different param groups.
    """
    _number(engine, optimizer, list(map(_keys, optimizer.param_groups)))


def follow_groups(engine: DeepSpeedEngine, optimizer: RuleOptimizer) -> None:
    """Takes up edits of ``param_groups`` since the last step. All ranks of any model call it.

    Raises:
        ValueError: on all ranks; a new parameter cannot be stepped, or the stages of a pipeline
            have different numbers of groups.
    """
    consensus.together(optimizer.follow_groups, ValueError)
    if is_pipeline(engine):
        _number(engine, optimizer, [{} for _ in optimizer.param_groups])


def _number(engine: DeepSpeedEngine, optimizer: RuleOptimizer, keys: list[dict[str, Any]]) -> None:
    """The same, with the keys that the groups must have alike on all stages."""
    names = {p: plain(name) for p, name in engine.param_names.items()}
    merged = _merged(keys, [group["params"] for group in optimizer.param_groups], names)
    if merged is None:
        raise ValueError(
            "the stages of a PipelineModule have optimizers with different param groups: name the "
            'optimizer in the config ("optimizer": {"type": ...}), which makes the same for all.'
        )
    optimizer.number_among(names, merged)


# Where parameters lie.


def layout_of(engine: DeepSpeedEngine, kind: Callable[[Group], Placement]) -> Stage:
    """Returns the layout of this rank's stage.

    Args:
        engine: of a PipelineModule.
        kind: how parameters are spread over the ranks of a stage.
    """
    group: Group = engine.seq_data_parallel_group
    names: Mapping[Tensor, str] = engine.param_names
    ties = _ties(engine.module)
    stages_of = {p: size_of(tie.group) for tie in ties for p in tie.params}

    @functools.cache
    def placement(stages: int) -> Placement:
        made = kind(group)
        made.num_replicas *= stages
        return made

    return Stage(
        group,
        names,
        lambda param: placement(stages_of.get(param, 1)),
        _weights(names, engine.module.stage_id),
        ties,
        engine.device,
    )


def _ties(module: PipelineModule) -> list[Tie]:
    """The tied layers that other stages have too, in the same order on all ranks."""
    return [
        Tie(own["group"], list(own["module"].parameters()))
        for own in module.tied_comms.values()
        if dist.get_world_size(own["group"]) > 1
    ]


def _weights(names: Mapping[Tensor, str], stage: int) -> list[Weight]:
    """The parameters of all stages, of which this rank's has some.

    Raises ValueError on all ranks if stages have one that is not tied, or differ in a tied one.
    """
    own = [(Weight(name, p.numel(), p.dtype), p.requires_grad) for p, name in names.items()]
    found: dict[str, tuple[int, tuple[Weight, bool]]] = {}
    everyone = consensus.gathered((stage, own))
    for there, told in ((there, told) for there, of_rank in everyone for told in of_rank):
        name = told[0].name
        first, known = found.setdefault(name, (there, told))
        if first != there and not name.startswith(_TIED):
            raise ValueError(
                f"{name} is on several stages and not tied: put it into a layer, or a "
                "TiedLayerSpec."
            )
        if known != told:
            raise ValueError(
                f"{name} is tied, and its stages differ in its size, dtype or requires_grad: make "
                "them alike."
            )
    return [found[name][1][0] for name in in_order([list(found)])]


# Files.


def layer_names(engine: DeepSpeedEngine) -> dict[int, str]:
    """Returns what names of a layer's parameters begin with, by its number, of all layers.

    Nothing for a model that is no PipelineModule.
    """
    specs = enumerate(engine.module._layer_specs if is_pipeline(engine) else ())
    return {
        i: f"{_TIED}{spec.key}." if isinstance(spec, TiedLayerSpec) else f"{i}."
        for i, spec in specs
    }
