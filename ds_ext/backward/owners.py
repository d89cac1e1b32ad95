"""Owners of parameters: the object whose hooks step a parameter inside backward.

A parameter has one owner, because two sets of hooks would each take its gradient. A new owner of a
model takes the parameters over, as a new engine does with DeepSpeed's own optimizers.
"""

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from ds_ext.backward import error_texts
from ds_ext.distributed import consensus
from ds_ext.distributed.groups import Group
from ds_ext.logs import logger
from ds_ext.optimizer import plain_step
from ds_ext.optimizer.bucket_optimizer import BucketOptimizer

GradientOwner: TypeAlias = Any  # a ``FusedBackward``, whose module imports this one

_owners: Any = WeakTensorKeyDictionary()  # parameter: weak reference to its Owner
# Weak references to all owners, by a number that counts up: an order that is the same on all ranks,
# unlike that of a set. Each change and each copy is one operation of a dictionary with integers as
# keys, which runs no other Python code. A lock instead would hang a thread whose garbage collector
# deletes an engine while the thread holds it.
_owners_by_number: dict[int, Any] = {}
_numbers = itertools.count()


def all_owners() -> list[GradientOwner]:
    """Returns all owners, of any thread, in the order in which they claimed parameters.

    Owners that one loss uses end their backward passes in this order, by collectives.
    """
    references = _owners_by_number.copy().values()
    return [by for reference in references if (by := reference()) is not None]


def owner(param: Tensor) -> GradientOwner:
    """Returns the owner of ``param``, or None."""
    found = _owners.get(param)
    return None if found is None else found()


def of(params: Iterable[Tensor]) -> list[GradientOwner]:
    """Returns the owners of ``params``, each once."""
    return list(dict.fromkeys(filter(None, map(owner, params))))


def refuse_second(optimizer: BucketOptimizer) -> None:
    """Checks that nothing else steps the parameters of an optimizer that finds no gradients.

    Raises:
        RuntimeError: an engine or ``fuse_into_backward`` steps them, with another optimizer.
    """
    if not _owners_by_number:
        return
    others = [by.optimizer for by in of(optimizer.group_of) if by.optimizer is not optimizer]
    if others:
        name = type(optimizer).__name__
        raise RuntimeError(
            f"{name}.step() found no gradients: an engine or fuse_into_backward steps these "
            f"parameters inside backward with another optimizer, {type(others[0]).__name__}. "
            f"Remove this {name}."
        )


plain_step.WITHOUT_GRADIENTS.append(refuse_second)


def claim(param: Tensor, by: GradientOwner, name: str) -> None:
    """Makes ``by`` the owner of ``param``. Raises RuntimeError if it has another one."""
    other = owner(param)
    if other is not None and other is not by:
        raise RuntimeError(
            f"two engines or fuse_into_backward calls step {name}: freeze it in one of their "
            "models, or end one of them (engine.destroy(), or .remove() on the object that "
            "fuse_into_backward returned)."
        )
    _owners[param] = weakref.ref(by)
    if by not in all_owners():
        _owners_by_number[next(_numbers)] = weakref.ref(by)


def release(params: Iterable[Tensor], by: GradientOwner) -> None:
    """Removes the owner of those ``params`` that ``by`` owns."""
    for number, reference in _owners_by_number.copy().items():
        if reference() in (by, None):
            _owners_by_number.pop(number, None)
    for param in params:
        if owner(param) is by:
            del _owners[param]


def check_finished(params: Iterable[Tensor], group: Group = None) -> list[GradientOwner]:
    """Returns the owners of ``params``; all ranks of ``group`` call it.

    Raises RuntimeError on all ranks if an owner is in the middle of a step on any of them.
    """
    olders = of(params)
    unfinished = [lost for older in olders if (lost := older.unfinished())]
    pending = [lost for lines in consensus.gathered(unfinished, group) for lost in lines]
    if pending:
        raise RuntimeError(
            "another engine or fuse_into_backward call is in the middle of a step of this model, "
            f"with {pending[0]}. Finish that step, or discard it: call zero_grad(), "
            "engine.destroy(), or .remove() on the object that fuse_into_backward returned."
        )
    return olders


def take_over(params: Iterable[Tensor], group: Group = None) -> None:
    """Makes all owners of ``params`` give way, and logs a warning if there are any.

    All ranks of ``group`` call it. Raises RuntimeError as ``check_finished``, before anything is
    changed.
    """
    olders = check_finished(params, group)
    for older in olders:
        older.give_way()
    if olders and consensus.is_first():
        logger.warning(
            "another engine or fuse_into_backward call was made for this model and not destroyed: "
            "the new one takes over, and the older one can no longer be used."
        )


def may_reach_others(by: GradientOwner) -> bool:
    """Returns whether another model's loss may have started the backward pass in progress.

    In a GAN, the generator's loss reaches the discriminator, whose gradients zero_grad() discards
    before the discriminator is trained.

    Raises:
        RuntimeError: the pass reaches a model with another loss scale.
    """
    # A rank that has no batch gets its receiver outside of a backward pass.
    if len(_owners_by_number) < 2 or torch._C._current_graph_task_id() == -1:
        return False
    others = [  # whose parameters are in the graph of this pass
        other
        for other in all_owners()
        if other is not by
        and any(
            torch._C._will_engine_execute_node(_node(leaf))
            for leaf in other.layout.own_leaves({p for p in _stepped_by(other) if p.requires_grad})
        )
    ]
    if not by.own_loss_is_running:
        # A segment's graph and the outer graph do not contain each other's leaves.
        others += [
            other
            for other in others_used(by)
            if other.uses.used_at > by.uses.made_at
            and (by.uses.in_segment or other.uses.in_segment)
        ]
    own = by.state.reader.loss_scale
    for other in others:
        if (scale := other.state.reader.loss_scale) != own:
            raise RuntimeError(error_texts.OTHER_SCALE.format(other=scale, own=own))
    return bool(others) and not by.own_loss_is_running


def _node(leaf: Tensor) -> Node:
    """The node that accumulates the gradient of a leaf."""
    if not leaf.is_inference():
        return get_gradient_edge(leaf).node
    # ZeRO-3 has gathered or partitioned it in inference mode: autograd records no views of it.
    with torch.enable_grad():
        empty: Any = leaf.new_empty(0, *leaf.shape) + leaf
    node: Node = empty.grad_fn.next_functions[1][0]
    return node


def stepping(leaves: Iterable[Tensor]) -> list[GradientOwner]:
    """Returns the owners of the parameters that the leaves of a graph stand for."""
    if not _owners_by_number:
        return []
    found = {id(leaf) for leaf in leaves}
    return [
        by
        for by in all_owners()
        if any(id(leaf) in found for leaf in by.layout.own_leaves(_stepped_by(by)))
    ]


def _stepped_by(by: GradientOwner) -> set[Tensor]:
    """The parameters of an owner's optimizer that no other owner has."""
    return {p for p in by.optimizer.group_of if owner(p) is by}


def others_used(by: GradientOwner) -> list[GradientOwner]:
    """Returns other owners whose models this thread has called since their last backward pass.

    Forward passes run in the calling thread, on any device. Other threads' are for other losses.
    """
    return [
        other
        for other in all_owners()
        if other is not by and other.uses.used_at and other.uses.thread == by.uses.thread
    ]
