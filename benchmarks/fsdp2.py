"""Counts the bytes that a step sends under FSDP2, with torch's FSDP2 and ds_ext's layout.

``fully_shard`` is applied to each layer and then to the model, in a process group that sends
nothing. Forward and backward run on tensors without storage. FSDP2's units, padding, gradient order
and collectives are therefore torch's own. ``reduced`` passes the gradients in this order to
ds_ext's buckets, with the layout of FSDP2 models.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import collectives, giants
from benchmarks.collectives import ALL_GATHER, REDUCE_SCATTER, Call
from benchmarks.counting import NORM, Bucket, Owner, Pretended, Rule, zeros_on_hosts
from benchmarks.giants import MODELS, Counted
from ds_ext.backward.buckets import Buckets
from ds_ext.backward.reduced_grad import ReducedGrad, VotedParams
from ds_ext.distributed import dtensors
from ds_ext.distributed import fully_shard as layouts
from ds_ext.optimizer import OPTIMIZERS


class Counts(NamedTuple):
    """The bytes that FSDP2 and ds_ext send in a step, without the rules' rounds."""

    buckets: list[Bucket]  # one per reduction of FSDP2, with the parameters stepped after it
    gathers: list[Call]  # of weights


class Pass(NamedTuple):
    """A forward and backward pass of FSDP2."""

    arrived: list[tuple[str, int]]  # parameters, and the number of earlier reductions
    calls: list[Call]


def reduced(
    model: nn.Module,
    units: Sequence[nn.Module],
    backward: Callable[[nn.Module], None],
    ranks: int,
    size: int,
) -> Counts:
    """Returns the bytes that the first rank sends in a step of a model on "meta".

    Args:
        model: a model without storage. ``fully_shard`` is applied to its units and then to itself.
        units: the model's layers.
        backward: runs forward and backward on fake CPU tensors.
        ranks: the number of ranks that share the model.
        size: the number of elements that ds_ext steps together.
    """
    with _among(ranks) as mesh:
        for unit in units:
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
        seen = _passed(model, backward)
        _to_meta(model)
        layout = layouts.FSDP2Layout(model, layouts.group_of(model))
        found = _stepped(model, layout, seen, ranks, size)
    return Counts(found, [call for call in seen.calls if call.kind == ALL_GATHER])


@contextlib.contextmanager
def _among(ranks: int) -> Iterator[DeviceMesh]:
    """Context in which this process is the first of ``ranks`` ranks. Collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def _passed(model: nn.Module, backward: Callable[[nn.Module], None]) -> Pass:
    """Runs forward and backward of a model under FSDP2, on tensors without storage."""
    arrived: list[tuple[str, int]] = []
    with FakeTensorMode(allow_non_fake_inputs=True), collectives.noted() as calls:
        model.to_empty(device="cpu")  # FSDP2 does not run on "meta"

        def hook(name: str, param: Tensor) -> None:
            param.grad = None
            arrived.append((name, sum(call.kind == REDUCE_SCATTER for call in calls)))

        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(functools.partial(hook, name))
        backward(model)
    return Pass(arrived, calls)


def _to_meta(model: nn.Module) -> None:
    """Replaces fake parameters by parameters on "meta", on which ds_ext computes."""
    for module in model.modules():
        for key, param in list(module.named_parameters(recurse=False)):
            part = torch.empty(dtensors.local(param).shape, dtype=param.dtype, device="meta")
            lying = dtensors.lying_as(param, part, tuple(param.shape))
            module._parameters[key] = nn.Parameter(lying)


def _stepped(
    model: nn.Module, layout: layouts.FSDP2Layout, seen: Pass, ranks: int, size: int
) -> list[Bucket]:
    """Passes gradients to ds_ext's buckets in FSDP2's order; returns all buckets."""
    found: list[Bucket] = []
    pretended = Pretended(ranks)
    sums = [call.nbytes for call in seen.calls if call.kind == REDUCE_SCATTER]

    class Noting:
        """Receiver that records which parameters would be stepped after the last reduction."""

        adds_up = False

        def voted_params(self, params: Sequence[Tensor]) -> VotedParams:
            return VotedParams(host=set(params))

        def receive(self, grads: dict[Tensor, ReducedGrad]) -> None:
            agreed = tuple(call.nbytes for call in pretended.calls)
            pretended.calls.clear()
            stepped = tuple(layout.names[p] for p in grads)
            if found[-1].stepped:
                found.append(Bucket(ranks, (), found[-1].place, agreed, (), (), (), stepped))
            else:
                found[-1] = found[-1]._replace(agreed=agreed, stepped=stepped)

    params = {name: p for p, name in layout.names.items()}

    def vote(votes: Tensor, group: object, async_op: bool) -> Pretended:
        return pretended.allreduce_coalesced([votes])

    with mock.patch.object(dist, "all_reduce", vote), zeros_on_hosts():
        is_ours = layout.names.__contains__
        comm_dtype, look = (lambda p: None), (lambda: None)
        buckets = Buckets(model, layout, size, comm_dtype, look, is_ours, Noting, Owner())
        place = 0
        for number, together in itertools.groupby(seen.arrived, lambda arrival: arrival[1]):
            names = tuple(name for name, _ in together)
            place += len(names)
            found.append(Bucket(ranks, names, place, (), (sums[number - 1],), (), (), ()))
            for name in names:
                params[name].grad = torch.zeros_like(params[name])
                buckets.take(params[name])
        for _ in range(2):  # at the end of backward, and in step()
            buckets.finish()
        buckets.remove()
    return found


@dataclass(frozen=True)
class FullySharded(Counted):
    """A language model that FSDP2 shards among some ranks."""

    @property
    def gathers(self) -> list[Call]:
        """FSDP2's gathers of weights."""
        return _counts(self).gathers

    def rule(self, optimizer: str) -> Rule:
        """Returns an optimizer's rules for whole rows."""
        return _rules(self.name)[optimizer]

    def buckets(self) -> list[Bucket]:
        """Returns the buckets in order, without the rules' rounds. The last one sums the norm."""
        found = _counts(self).buckets
        return [*found, Bucket(self.ranks, (), found[-1].place, (), (), (NORM,), ())]


@functools.cache
def _rules(name: str) -> dict[str, Rule]:
    model = giants.made(name)[0]
    return {optimizer: Rule(optimizer, model, dtensors.rows_of) for optimizer in OPTIMIZERS}


@functools.cache
def _counts(counted: FullySharded) -> Counts:
    model = MODELS[counted.name].make()
    layers = list(model.get_submodule("model.layers").children())
    backward = functools.partial(giants.backward, device="cpu")
    return reduced(model, layers, backward, counted.ranks, counted.size)
