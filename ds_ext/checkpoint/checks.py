"""Checks that a checkpoint matches a model and its optimizer, before anything is loaded."""

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

from torch import Tensor

from ds_ext import hyperparams
from ds_ext.checkpoint.pieces import Pieces
from ds_ext.checkpoint.resharding import OwnedRun, of_all_ranks, save_groups
from ds_ext.errors import CheckpointError
from ds_ext.ops.state import leaves
from ds_ext.ops.state import saved as saved_parts
from ds_ext.optimizer import RuleOptimizer
from ds_ext.optimizer.param_table import of_this_version

_WEIGHTS_ONLY = (
    "To load only the weights: load_checkpoint(..., load_optimizer_states=False); with HF Trainer, "
    "from_pretrained of the checkpoint's folder, without resume_from_checkpoint."
)


def check(
    pieces: Pieces,
    optimizer: RuleOptimizer,
    owned: Mapping[Tensor, OwnedRun],
    strict: bool,
    names: Iterable[str] | None = None,
    with_state: bool = True,
) -> None:
    """Checks that weights, groups and state match this optimizer and its parameters.

    Args:
        pieces: the saved state of all ranks.
        optimizer: the optimizer that will load the state.
        owned: this rank's run of each parameter of the model.
        strict: whether the model and the checkpoint must have the same parameters.
        names: the names of all parameters of the model; by default the names in ``owned``.
        with_state: whether to check more than weights.

    Raises:
        CheckpointError: the message names the difference.
    """
    kind = type(optimizer).__name__
    if with_state and (saved := pieces.saved[0]["optimizer"]) != kind:
        raise CheckpointError(
            f"this checkpoint was saved with {saved}, but the optimizer is {kind}. {_WEIGHTS_ONLY}"
        )
    _check_weights(pieces, owned, strict, names or [own.name for own in owned.values()])
    if with_state:
        optimizer.follow_groups()
        _check_groups(pieces, optimizer, owned)
        _check_state(pieces, optimizer, owned)


def _check_weights(
    pieces: Pieces, owned: Mapping[Tensor, OwnedRun], strict: bool, names: Iterable[str]
) -> None:
    """Raises CheckpointError if a weight has another shape, or elements or weights are missing."""
    missing = []
    for own in owned.values():
        found = pieces.first("weights", own.name)
        if found is None:
            missing.append(own.name)
        elif tuple(found["shape"]) != own.shape:
            raise CheckpointError(
                f"this checkpoint does not match the model: {own.name} has shape "
                f"{tuple(found['shape'])} in the checkpoint and {own.shape} in the model."
            )
        else:
            pieces.require(own.part, own.name, "weights", own.name)
    known = set(of_all_ranks(names))
    saved = set(of_all_ranks(pieces.weight_names()))
    unknown = saved - known
    if strict and (missing or unknown):
        parts = [f"missing in the checkpoint: {', '.join(missing[:5])}"] if missing else []
        parts += [f"missing in the model: {', '.join(sorted(unknown)[:5])}"] if unknown else []
        raise CheckpointError(f"this checkpoint does not match the model: {'; '.join(parts)}.")


def _check_groups(
    pieces: Pieces, optimizer: RuleOptimizer, owned: Mapping[Tensor, OwnedRun]
) -> None:
    """Raises CheckpointError if parameters or rules of groups differ from the saved groups."""
    groups, own = save_groups(optimizer, owned), type(optimizer).__name__
    none: dict[str, Any] = {"params": []}
    pairs = zip_longest(pieces.saved[0]["groups"], groups, fillvalue=none)
    for i, (was, group) in enumerate(pairs):
        if was["params"] != group["params"]:
            differ = sorted(set(was["params"]).symmetric_difference(group["params"]))[:5]
            raise CheckpointError(
                "this checkpoint has other parameter groups than the optimizer: group "
                f"{i} differs in {', '.join(differ) or 'the order of its parameters'}. Use the "
                "param_groups of the run that saved it; whether weight_decay is 0 also decides the "
                f"groups. {_WEIGHTS_ONLY}"
            )
        if was.get("type") != group.get("type"):
            raise CheckpointError(
                f"group {i} of this checkpoint was saved with {was.get('type', own)}, but the "
                f"optimizer has {group.get('type', own)}. {_WEIGHTS_ONLY}"
            )


def _check_state(
    pieces: Pieces, optimizer: RuleOptimizer, owned: Mapping[Tensor, OwnedRun]
) -> None:
    """Raises CheckpointError if a state tensor of the saved groups' rules is incomplete."""
    for group, saved in zip(optimizer.param_groups, pieces.saved[0]["groups"], strict=True):
        hypers = optimizer.hypers_of(saved)
        names = hyperparams.names(hypers)
        known = of_this_version(saved, hypers)
        rule = hypers(**{name: known[name] for name in names if name in known})
        for param in group["params"]:
            own = owned[param]
            if pieces.first("state", own.name) is None:
                continue
            for keys, part in leaves(saved_parts(optimizer.state_spec(param, own.shard, rule))):
                pieces.require(part, f"{own.name}'s {'.'.join(keys)}", "state", own.name, *keys)
