"""Counts what a step sends where FSDP2 cuts the model: by torch's own FSDP2, and ds_ext's layout.

``fully_shard`` cuts each layer and then the model, in a group of ranks that sends nothing, and runs
forward and backward on tensors without storage: its units, their padding, the order in which it
brings gradients and its collectives are torch's own. Gradients come in that order to ds_ext's
buckets, on the layout of FSDP2's models (``reduced``).
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
    """What FSDP2 and ds_ext send in a step, without the rounds of rules."""

    buckets: list[Bucket]  # one for each reduction of FSDP2's, and for what is stepped after it
    gathers: list[Call]  # of weights


class Pass(NamedTuple):
    """A forward and backward pass of FSDP2."""

    arrived: list[tuple[str, int]]  # parameters, and how many reductions there had been
    calls: list[Call]


def reduced(
    model: nn.Module,
    units: Sequence[nn.Module],
    backward: Callable[[nn.Module], None],
    ranks: int,
    size: int,
) -> Counts:
    """What the first of ``ranks`` sends in a step of a model on "meta", which this cuts.

    Args:
        model: without storage; ``fully_shard`` is applied to ``units`` of it, and then to it.
        units: layers.
        backward: runs it forward and backward, on fake tensors of the CPU.
        ranks: how many have parts.
        size: elements of parts that ds_ext steps together.
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
    """Makes this process the first of so many ranks, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def _passed(model: nn.Module, backward: Callable[[nn.Module], None]) -> Pass:
    """Runs a model that FSDP2 has cut forward and backward, on tensors without storage."""
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
    """Puts parameters on "meta", where ds_ext computes, in the place of fake ones."""
    for module in model.modules():
        for key, param in list(module.named_parameters(recurse=False)):
            part = torch.empty(dtensors.local(param).shape, dtype=param.dtype, device="meta")
            lying = dtensors.lying_as(param, part, tuple(param.shape))
            module._parameters[key] = nn.Parameter(lying)


def _stepped(
    model: nn.Module, layout: layouts.FSDP2Layout, seen: Pass, ranks: int, size: int
) -> list[Bucket]:
    """Brings gradients to ds_ext's buckets as FSDP2 did -> all buckets."""
    found: list[Bucket] = []
    pretended = Pretended(ranks)
    sums = [call.nbytes for call in seen.calls if call.kind == REDUCE_SCATTER]

    class Noting:
        """Notes what would be stepped after the reduction that was last."""

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
        for _ in range(2):  # when backward has ended, and in step()
            buckets.finish()
        buckets.remove()
    return found


@dataclass(frozen=True)
class FullySharded(Counted):
    """A language model that FSDP2 has cut over some ranks."""

    @property
    def gathers(self) -> list[Call]:
        """FSDP2's gathers of weights."""
        return _counts(self).gathers

    def rule(self, optimizer: str) -> Rule:
        """An optimizer's rules for whole rows."""
        return _rules(self.name)[optimizer]

    def buckets(self) -> list[Bucket]:
        """What is sent in order, without the rounds of rules; at the end the sum of the norm."""
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
