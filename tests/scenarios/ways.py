"""The ways of stepping by ds_ext: ``optimizer.step()``, fused, replicas, FSDP2, and an engine."""

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Collection
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_ext
from tests.common import engines
from tests.common.ranks import whole
from tests.common.states import tensors
from tests.scenarios.sides import KINDS, Failure, Side


class Plain(Side):
    """``optimizer.step()`` by what is in ``grad``."""

    world = 1

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup, [dist.get_rank() if self.world > 1 else 0])

    def make(self, kind: str, groups: list[dict[str, Any]]) -> Any:
        return getattr(ds_ext, kind)(groups, **KINDS[kind][0])

    def discard(self, seed: int, how: str) -> None:
        with contextlib.suppress(Failure):
            loss = self.loss(seed, how=how)
            if how.endswith("backward"):
                self.backward(loss)
        self.give_up()

    def local(self, p: Any) -> Tensor:
        """What this process holds of a weight."""
        return p.detach()

    def whole(self) -> dict[str, Tensor]:
        return whole(self.model)

    def snapshot(self) -> dict[str, Tensor]:
        """All that a refused call must leave as it is; it may cast a state as a step would."""
        named, waiting = self.model.named_parameters(), self.waiting()
        found = {n: self.local(p).clone() for n, p in named if p not in waiting}
        for i, group in enumerate(self.optimizer.param_groups):
            hypers = [float(group[key]) for key in ("lr", "weight_decay")]
            found[f"group {i}"] = torch.tensor([*hypers, len(group["params"])])
            for j, p in enumerate(group["params"]):
                if p in waiting:
                    continue
                state = self.optimizer.state.get(p, {})
                found[f"steps {i} {j}"] = torch.tensor(float(state.get("step", 0)))
                for k, t in enumerate(tensors(state)):
                    found[f"state {i} {j} {k}"] = t.detach().float().clone()
        return found

    def waiting(self) -> Collection[Tensor]:
        """Parameters whose steps by earlier calls are still to come."""
        return ()

    def score(self) -> None:
        with torch.inference_mode():
            self.critic(torch.ones(1, 3))

    @functools.cached_property
    def critic(self) -> Any:
        """Another model, which is trained in the same way."""
        return nn.Linear(3, 2)


class Fused(Plain):
    """``fuse_into_backward``; not if the policy is "plain", as FSDP2 may have it."""

    def attach(self) -> None:
        setup, max_norm = self.setup, {"max_grad_norm": self.setup["max"]}
        limits = {
            "none": {},
            "exact": max_norm,
            "previous": {**max_norm, "clip_mode": "previous"},
            "value": {"clip_value": setup["max"]},
        }[setup["clip"]]
        how = {"bucket_size": setup["bucket"], "gradient_policy": setup["policy"]} | limits
        self.is_plain = setup["policy"] == "plain"
        if not self.is_plain:
            self.fused = ds_ext.fuse_into_backward(self.model, self.optimizer, **how)

    def waiting(self) -> Collection[Tensor]:
        return () if self.is_plain else self.fused.buckets.waiting

    @functools.cached_property
    def critic(self) -> Any:
        model = nn.Linear(3, 2)
        ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters(), lr=0.1))
        return model

    def detach(self) -> None:
        if not self.is_plain:
            self.fused.remove()

    def clip(self) -> None:
        if self.is_plain:
            super().clip()

    def backward(self, loss: Tensor, **how: Any) -> None:
        loss = loss / self.setup["accumulation"]
        if self.is_plain or how:
            self.is_plain or self.fused.measure_norm(loss)
            loss.backward(**how)
        else:
            self.fused.backward(loss)


class Replicas(Fused):
    """The same on two ranks, each with the whole model."""

    world = 2


class FSDP2(Replicas):
    """The same of a model to which ``fully_shard`` was applied."""

    def spread(self) -> None:
        mesh = init_device_mesh("cpu", (self.world,))
        for module in (self.model.embed, self.model.first, self.model.last, self.model):
            fully_shard(module, mesh=mesh)

    def local(self, p: Any) -> Tensor:
        return p.to_local().detach()

    def zero_grad(self) -> None:
        self.model.reshard()  # a forward pass without a backward one leaves the root gathered
        super().zero_grad()


class Engine(Plain):
    """DeepSpeed's engine, at the stage that is set."""

    world = 2

    def attach(self) -> None:
        setup = self.setup
        own = {"gradient_policy": setup["policy"]}
        if setup["clip"] == "value":
            own["clip_value"] = setup["max"]
        if setup["clip"] == "previous":
            own["clip_mode"] = "previous"
        config = engines.config(
            setup["stage"],
            train_micro_batch_size_per_gpu=4,
            gradient_accumulation_steps=setup["accumulation"],
            gradient_clipping=setup["max"] if setup["clip"] in ("exact", "previous") else 0.0,
            zero={"reduce_bucket_size": setup["bucket"] or 10**6},
            ds_ext=own,
        )
        self.config, self.client = config, self.optimizer
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.client, config=config
        )
        self.forward, self.backward = self.engine, self.engine.backward
        self.step = self.engine.step
        owners = self.engine, self.engine.optimizer, self.client, self.model
        self.discarding = itertools.cycle([owner.zero_grad for owner in owners])

    @functools.cached_property
    def critic(self) -> Any:
        model = nn.Linear(3, 2)
        optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=self.config)[0]

    def zero_grad(self) -> None:
        """By all that a script may call, in turn."""
        next(self.discarding)()

    def detach(self) -> None:
        self.engine.destroy()

    def schedule(self, gamma: float) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.client, gamma)

    def local(self, p: Any) -> Tensor:
        """At stage 3 without the padding, which DeepSpeed does not keep."""
        if not hasattr(p, "ds_tensor"):
            return p.detach()
        run = p.ds_tensor.detach()
        return run[: max(0, p.ds_numel - dist.get_rank() * len(run))]

    def editable(self, p: Tensor) -> contextlib.AbstractContextManager[Any]:
        return deepspeed.zero.GatheredParameters([p], modifier_rank=0)

    def save(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.saved = [self.folder.name]
        dist.broadcast_object_list(self.saved)
        self.engine.save_checkpoint(*self.saved, tag="here")

    def load(self) -> None:
        self.engine.load_checkpoint(*self.saved, tag="here")


WAYS: dict[str, type[Plain]] = {"plain": Plain, "fused": Fused, "replicas": Replicas}
WAYS |= {"fsdp2": FSDP2, "engine": Engine}
