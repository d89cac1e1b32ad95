"""Gradients become updates while backward runs: hooks, buckets, reduce-scatter, grad norm.

A hook takes each gradient as autograd finishes it and puts it in a bucket. A full bucket is
reduce-scattered in place, so that each rank's run of the mean gradient lies inside the gradient's
own memory; the rules of its parameters then run in lock-step, and the bucket is freed.
"""

import logging
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ds_ext import ops, settings
from ds_ext.layout import Group, Replicated
from ds_ext.optimizer import RuleOptimizer, Update
from ds_ext.uses import Uses

logger = logging.getLogger("ds_ext")


class Run(NamedTuple):
    """This rank's run of a reduced gradient, padded, and whether any rank's part was not finite."""

    g: Tensor
    bad: Tensor  # [], true on all ranks alike


class FusedBackward:
    """Steps ``optimizer`` from gradient hooks, on the runs that ``layout`` gives to this rank.

    At most ``bucket_size`` gradient elements wait in the bucket, or one parameter larger than
    that. Gradients are reduced in ``comm_dtype``, and averaged over the ranks if ``average``.
    A parameter whose gradient comes in several parts (``uses.py``) is stepped when backward has
    ended: until then its runs are added up.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: RuleOptimizer,
        layout: Replicated,
        bucket_size: int,
        comm_dtype: torch.dtype | None = None,
        average: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self.layout = layout
        self.bucket_size = bucket_size
        self.comm_dtype = comm_dtype
        self.average = average
        self.uses = Uses(module)
        self.bucket: dict[Tensor, Tensor] = {}  # gradients, flat and padded to equal parts
        self.held: dict[Tensor, Run] = {}  # of parameters whose gradient comes in parts
        self.stepped: set[Tensor] = set()  # since the last end_step()
        self.skipped = 0  # updates left out because a gradient was not finite
        self.square_norm: Tensor | None = None  # of this rank's runs
        self.norm: float | None = None  # of all gradients of the last step
        chosen = {p for group in optimizer.param_groups for p in group["params"]}
        outside = [p for p in module.parameters() if p.requires_grad and p not in chosen]
        if outside and layout.rank == 0:
            names = ", ".join(map(layout.name, outside))
            logger.warning("trainable but not given to the optimizer, not updated: %s", names)
        self.hooks = [
            p.register_post_accumulate_grad_hook(self._take if p in chosen else _drop)
            for p in (*chosen, *outside)
            if p.requires_grad
        ]

    def remove(self) -> None:
        """Takes the hooks off the parameters and modules."""
        for hook in (*self.hooks, *self.uses.hooks):
            hook.remove()

    @torch.no_grad()
    def _take(self, param: Tensor) -> None:
        """Moves a finished gradient into the bucket; the hook."""
        grad, param.grad = param.grad, None
        if param in self.stepped:
            raise RuntimeError(
                f"{self.layout.name(param)} got a second gradient after its update and before "
                "engine.step(). Gradients are used up inside backward: call backward once a step "
                "(add losses up before), and use checkpointing with use_reentrant=False where a "
                "weight is reached by two checkpointed segments other than through its module."
            )
        if not grad.numel():
            return
        if param in self.bucket:  # a further part, of another checkpointed segment
            self.bucket[param] = self.bucket[param] + self._own(grad)
            return
        if self.elements + grad.numel() > self.bucket_size:
            self.flush()
        self.bucket[param] = self._own(grad)
        del grad
        if self.elements >= self.bucket_size:
            self.flush()

    @property
    def elements(self) -> int:
        """Gradient elements that wait in the bucket."""
        return sum(flat.numel() for flat in self.bucket.values())

    def _own(self, grad: Tensor) -> Tensor:
        """A gradient, flat, in equal parts for all ranks, in memory that may be written to."""
        # Autograd may hand out a view of a gradient that other nodes still wait to read.
        is_shared = self.layout.world > 1 and _storage_users(grad) > _SOLE_USER
        flat = grad.reshape(-1).to(self.comm_dtype or grad.dtype)
        missing = -flat.numel() % self.layout.parts
        if missing:
            return nn.functional.pad(flat, (0, missing))
        is_view = flat.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr()
        return flat.clone() if is_shared and is_view else flat

    @torch.no_grad()
    def flush(self) -> None:
        """Reduces the bucket and steps its parameters, but holds those with more parts to come."""
        if not self.bucket:
            return
        bucket, self.bucket = self.bucket, {}
        self.layout.agree(bucket)
        runs = dict(zip(bucket, self._reduce(list(bucket.values())), strict=True))
        for param in [p for p in runs if self.uses.in_parts(p)]:
            self._hold(param, runs.pop(param))
        self._step(runs)

    @torch.no_grad()
    def finish(self) -> None:
        """Ends a backward pass: what waits in the bucket or was held is stepped."""
        self.flush()
        self.layout.agree([])
        held, self.held = self.held, {}
        self._step(held)
        self.uses.clear()

    def _hold(self, param: Tensor, run: Run) -> None:
        g = run.g.to(ops.accumulator(run.g.dtype), copy=True)  # lets go of the whole gradient
        if param in self.held:
            before = self.held[param]
            self.held[param] = Run(before.g.add_(g), before.bad | run.bad)
        else:
            self.held[param] = Run(g, run.bad)

    def _reduce(self, flats: list[Tensor]) -> list[Run]:
        """This rank's runs of the reduced gradients, inside the memory of ``flats``.

        Every rank also tells every other whether its own gradient has a value that is not finite
        or may not stay so when summed, so that all agree whichever run the value lies in.
        """
        bad = torch.stack([self._is_bad(flat) for flat in flats])
        votes = bad.to(torch.float32).repeat(self.layout.parts)
        *runs, votes = self.layout.reduce((*flats, votes))
        if self.average and self.layout.world > 1:
            for run in runs:
                run.div_(self.layout.world)
        return list(map(Run, runs, (votes > 0).unbind()))

    def _is_bad(self, flat: Tensor) -> Tensor:
        """Whether a gradient is not finite, or its sum over ranks or its square may not be."""
        low, high = torch.aminmax(flat)
        squares = (torch.finfo(ops.accumulator(flat.dtype)).max / flat.numel()) ** 0.5
        bound = min(torch.finfo(flat.dtype).max, squares) / self.layout.world
        return ~((high <= bound) & (low >= -bound))

    def _step(self, runs: dict[Tensor, Run]) -> None:
        """Steps parameters by their reduced runs, but none whose gradient is not finite."""
        if not runs:
            return
        updates = [self._update(param, run.g) for param, run in runs.items()]
        for u in updates:
            square = ops.square_sum(u.g, u.shard, u.g)
            self.square_norm = square if self.square_norm is None else self.square_norm + square
        self.stepped.update(runs)
        bad = torch.stack([run.bad for run in runs.values()]).tolist()
        good = [u for u, b in zip(updates, bad, strict=True) if not b]
        self.optimizer.update(good, self.layout.all_reduce)
        self.layout.publish(u.param for u in good)
        for u, b in zip(updates, bad, strict=True):
            if b:
                self._report_skipped(u.param)

    def _update(self, param: Tensor, g: Tensor) -> Update:
        shard = self.layout.shard(param)
        return Update(param, self.layout.run(param), g[: len(shard)], shard)

    def _report_skipped(self, param: Tensor) -> None:
        self.skipped += 1
        if self.layout.rank == 0:
            name = self.layout.name(param)
            logger.warning(
                "%s: the gradient is not finite, or too large; not updated in this step", name
            )

    @torch.no_grad()
    def end_step(self) -> float | None:
        """Ends a step: the 2-norm of its gradients over all ranks, None if there were none."""
        self.finish()
        square, self.square_norm = self.square_norm, None
        self.stepped.clear()
        if square is None:
            return None
        self.layout.all_reduce(square)
        self.norm = float(square.sqrt())
        return self.norm


def fuse_into_backward(
    model: nn.Module,
    optimizer: RuleOptimizer,
    group: Group = None,
    bucket_size: int | None = None,
) -> FusedBackward:
    """Makes ``loss.backward()`` step each parameter as its gradient appears, with no engine.

    Go on calling ``optimizer.step()`` after backward: it ends the step, and the norm of all
    gradients is then ``.norm`` of what is returned; its ``remove()`` undoes this. Where
    torch.distributed is initialised, rank 0's weights are sent to all ranks of ``group`` and
    gradients are averaged, ``bucket_size`` elements at a time: do not wrap the model in DDP.
    """
    layout = Replicated(group, {p: name for name, p in model.named_parameters()})
    layout.broadcast(model)
    if bucket_size is None:
        bucket_size = settings.BUCKET_SIZE if layout.world > 1 else 1
    fused = FusedBackward(model, optimizer, layout, bucket_size)

    def end_step(*_: object) -> None:
        fused.end_step()

    fused.hooks.append(optimizer.register_step_pre_hook(end_step))
    return fused


def _drop(param: Tensor) -> None:
    """Frees the gradient of a trainable parameter that the optimizer was not given."""
    param.grad = None


def _storage_users(x: Tensor) -> int:
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


_SOLE_USER = _storage_users(torch.empty(1))
