"""Counts the bytes that a pipeline stage sends in a step, with ds_ext's layout and gradient policy.

In each micro-batch, the ranks of a stage sum the gradients of its layers and keep them. At the end
of the step, all ranks of all stages compute the norm and find bad gradients. Each stage then steps
its kept gradients, one bucket at a time.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import giants
from benchmarks.collectives import ALL_REDUCE, REDUCE_SCATTER
from benchmarks.counting import Bucket, Owner, Pretended, zeros_on_hosts
from benchmarks.giants import MODELS, Counted
from ds_ext.backward.buckets import Buckets
from ds_ext.backward.grad_scaling import GradientReader
from ds_ext.backward.gradient_config import GradientConfig
from ds_ext.backward.receivers import Accumulating
from ds_ext.backward.reduced_grad import ReducedGrad
from ds_ext.backward.step_state import Clipping, StepState
from ds_ext.distributed.groups import size_of
from ds_ext.distributed.layout import ParamInfo
from ds_ext.distributed.pipeline_layout import PipelineLayout
from ds_ext.distributed.placement import Replicated, Sharded
from ds_ext.planner import stages
from ds_ext.planner.memory import Shapes

KINDS: Mapping[int, type[Replicated] | type[Sharded]] = {0: Replicated, 1: Sharded}  # by ZeRO stage


def kept(
    model: nn.Module,
    own: Sequence[str],
    backward: Callable[[nn.Module], None],
    ranks: int,
    everyone: int,
    size: int,
    zero: int,
    micro_batches: int,
    is_last: bool = False,
) -> list[Bucket]:
    """Returns the bytes that the first rank of a stage sends in a step, without the rules' rounds.

    Args:
        model: a model on "meta" with the layers of all stages, without tied layers.
        own: the names of the stage's parameters.
        backward: computes their gradients for one micro-batch.
        ranks: the number of ranks of the stage.
        everyone: the number of ranks of all stages.
        size: reduce_bucket_size, in elements.
        zero: the ZeRO stage within the ranks of a pipeline stage, 0 or 1.
        micro_batches: the number of micro-batches in a step.
        is_last: whether the stage is the last one.
    """
    params = dict(model.named_parameters())
    group = Pretended(ranks, Pretended(everyone))
    found: list[Bucket] = []
    with _pretending(group), zeros_on_hosts():
        placement = KINDS[zero](group)  # type: ignore[arg-type]
        names = {params[name]: name for name in own}
        weights = [ParamInfo(name, p.numel(), p.dtype) for name, p in params.items()]
        meta = torch.device("meta")
        layout = PipelineLayout(group, names, lambda p: placement, weights, [], meta)  # type: ignore[arg-type]
        state = StepState(GradientReader(layout, GradientConfig(size, "sharded")))
        place = 0

        class Noting(Accumulating):
            """Receiver that records the gradients that it keeps."""

            def receive(self, grads: dict[Tensor, ReducedGrad]) -> None:
                nonlocal place
                place += len(grads)
                *agreed, summed = _taken(group)
                arrived = tuple(names[p] for p in grads)
                found.append(
                    Bucket(ranks, arrived, place, (*agreed,), (summed,), (), (), (), SUMS[zero])
                )
                super().receive(grads)

        is_ours = names.__contains__
        begin = functools.partial(Noting, state, None)
        comm_dtype, look = (lambda p: None), (lambda: None)
        buckets = Buckets(model, layout, size, comm_dtype, look, is_ours, begin, Owner())
        for _ in range(micro_batches):
            backward(model)
            if is_last:  # DeepSpeed announces the end of backward only on this stage
                buckets.finish()
        buckets.finish()  # in step()
        agreed = _taken(group)
        state.record(state.kept)
        state.reduce_norm(Clipping(0.0, "exact"))
        found.append(Bucket(ranks, (), place, agreed, (), (), (), ()))
        found.append(Bucket(everyone, (), place, (), (), _taken(group.group.WORLD), (), ()))
        for params_in_step in layout.in_step(list(names)):
            for piece in buckets.pieces(params_in_step):
                layout.publish(piece)
                is_summed = size_of(placement.statistics_group) > 1
                stepped = tuple(names[p] for p in piece) if is_summed else ()
                found.append(Bucket(ranks, (), place, (), (), (), _taken(group), stepped))
        buckets.remove()
    return found


SUMS = {0: ALL_REDUCE, 1: REDUCE_SCATTER}  # the collective that sums gradients, by ZeRO stage


def _taken(group: Pretended) -> tuple[int, ...]:
    """The bytes of a group's calls since the last call of this function."""
    found = tuple(call.nbytes for call in group.calls)
    group.calls.clear()
    return found


@contextlib.contextmanager
def _pretending(group: Pretended) -> Iterator[None]:
    """Context in which a simulated group replaces torch.distributed."""
    with contextlib.ExitStack() as stack:
        for module in ("layout", "placement", "pipeline_layout", "groups"):
            stack.enter_context(mock.patch(f"ds_ext.distributed.{module}.dist", group))
        yield


@dataclass(frozen=True)
class Staged(Counted):
    """The largest pipeline stage of a language model. ``stage`` is the ZeRO stage.

    Each rank computes as many tokens as without a pipeline: a pipeline takes the tokens of all its
    ranks, in ``micro_batches``.
    """

    stage: int = 1
    stages: int = 8
    micro_batches: int = 32

    @property
    def own(self) -> list[str]:
        """The parameter names of the stage with the most computation."""
        return list(max(self._stages(), key=self._computed))

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.own == list(self._stages()[-1])

    def _computed(self, names: Iterable[str]) -> float:
        work = self._work()
        return sum(work[name] for name in names)

    def _stages(self) -> list[Shapes]:
        shapes = {n: tuple(p.shape) for n, p in giants.made(self.name)[0].named_parameters()}
        return stages.cut(stages.layers(shapes, is_tied=False), self.stages)

    def buckets(self) -> list[Bucket]:
        """Returns the buckets in order, without the rules' rounds."""
        return _buckets(self)

    def ready(self, step: Sequence[Bucket], second: float) -> list[float]:
        """Returns the time at which each bucket's gradients are computed in the 1F1B schedule.

        All stages wait for the first stage, whose backward passes end last. It is assumed to
        compute for as long as the largest stage.

        ``second`` is the time of a forward pass per element, for all tokens of a rank, without a
        pipeline. A backward pass takes twice as long.
        """
        work = self._work()
        whole = self._computed(self.own)
        forward = second * whole * self.stages / self.micro_batches
        done, found = 0.0, []
        for bucket in step:
            done += sum(work[name] for name in bucket.params)
            passed = max(math.ceil(done / whole), 1)  # micro-batches, including this one
            ends = (self.stages + passed - 1) * 3 * forward
            found.append(ends - 2 * forward * (passed - done / whole))
        return found

    def _work(self) -> dict[str, float]:
        return MODELS[self.name].work(giants.made(self.name)[0])


@functools.cache
def _buckets(counted: Staged) -> list[Bucket]:
    model, own = giants.made(counted.name)[0], counted.own
    inside = {*own}
    order = [name for name in giants.order(counted.name) if name in inside]
    return kept(
        model,
        own,
        functools.partial(giants.in_order, order),
        counted.ranks // counted.stages,
        counted.ranks,
        counted.size,
        counted.stage,
        counted.micro_batches,
        counted.is_last,
    )
