"""Runs of mixtures of experts, by DeepSpeed's layers and Hugging Face's: on ranks, and alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_ext.engine import parameters
from tests.common import authors, by_role, engines
from tests.common.ranks import shared_folder
from tests.distributed.training_jobs import HYPERS


@dataclass(frozen=True)
class Run:
    kind: str  # "moe": DeepSpeed's layers; else a model of Hugging Face's
    rule: str
    stage: int | None  # None: fuse_into_backward, no engine
    world: int = 2
    ep: int = 0  # ranks that the experts are spread over; 0: Hugging Face's without AutoEP
    max_norm: float = 0.0
    policy: str = "fused"
    leaves: bool = False  # named here, beside those that DeepSpeed knows
    json: bool = False  # the optimizer is made by the config, for matrices of linear layers
    # a checkpoint, and the rest of the steps by another engine, at this stage and ``ep``
    then: tuple[int, int] | None = None
    tensor: int = 1  # ranks that layers beside the experts are divided over
    own: dict[str, Any] = field(default_factory=dict)  # hyper-parameters

    @property
    def settings(self) -> tuple[Any, ...]:
        """All that may interact but the rule, for ``choose.pairs``."""
        ranks = self.world, self.ep, self.tensor, self.then is None
        return self.kind, self.stage, *ranks, self.max_norm > 0, self.policy, self.json

    @property
    def hypers(self) -> dict[str, Any]:
        made = HYPERS[self.rule] | {"weight_decay": 0.1}
        # Updates of the first two are small beside their rounding. Those of APOLLO-Mini are so
        # large that gradients grow to 15 times, and with them the differences of rounding.
        lr = {"adafactor": 0.04, "galoreadamw": 0.04, "apollomini": 1e-3}.get(self.rule)
        return made | ({} if lr is None else {"lr": lr}) | self.own


def start(run: Run, model: nn.Module, stage: int | None, bucket: int, divided: Any, **more: Any):
    """An engine of a run; ``divided`` names the layers that tensor parallelism divides."""
    is_json = run.json and stage is not None
    more |= {"gradient_clipping": run.max_norm}
    more["zero"] = {"reduce_bucket_size": bucket, "stage3_param_persistence_threshold": 30}
    if is_json:
        more["optimizer"] = {"type": f"ds_ext.{run.rule}", "params": run.hypers}
    if run.tensor > 1:
        plan = {"use_default_specs": False, "layer_specs": divided}
        more["tensor_parallel"] = {"autotp_size": run.tensor, "partition_config": plan}
    optimizer = None if is_json else by_role.made(run.rule, model, run.hypers)
    return engines.start(model, optimizer, stage, run.policy, **more)


def trained(
    run: Run, start: Callable[..., Any], loss_of: engines.Loss, steps: int
) -> tuple[Any, dict[str, Any]]:
    """Trains on this rank, by the engines of ``start`` -> the last one, and what it told."""
    engine, norms = start(run, run.stage, run.ep), []
    for step in range(steps):
        if run.then and step == steps // 2:
            with shared_folder() as folder:
                engine.save_checkpoint(folder)
                engine = start(run, *run.then)
                with torch.no_grad():
                    for p in engine.module.parameters():
                        p.zero_()
                engine.load_checkpoint(folder)
        engine.backward(loss_of(engine, step, dist.get_rank() // run.tensor))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    divided = [n for n, p in engine.module.named_parameters() if parameters.is_divided(p)]
    return engine, {"norms": norms, "divided": len(divided)}


def optimizer(
    run: Run, named: Mapping[str, Tensor], linear: str, streams: Mapping[str, int]
) -> torch.optim.Optimizer:
    optimizer_of = authors.ordinary
    if run.json:
        optimizer_of = by_role.optimizer({p: n for n, p in named.items()}, linear, streams)
    spared = [p for p in named.values() if run.json and p.ndim < 2]
    others = [p for p in named.values() if not (run.json and p.ndim < 2)]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    hypers = {k: v for k, v in run.hypers.items() if k != "weight_decay"}
    return optimizer_of(run.rule, [group for group in groups if group["params"]], hypers)


def alone(
    run: Run, model: nn.Module, optimizer: Any, loss_of: engines.Loss, steps: int,
    experts: Sequence[Tensor]
) -> tuple[engines.Alone, Tensor]:  # fmt: skip
    """Trains in one process by the mean over ranks.

    Returns also whether each of ``experts``, matrices or stacks of them, had no gradient of the
    tokens of a rank: [steps, ranks, len(experts)], or [steps, ranks, len(experts), experts].
    """
    idle: list[Tensor] = []

    def noted(model: nn.Module, step: int, rank: int) -> Tensor:
        loss = loss_of(model, step, rank)
        grads = torch.autograd.grad(loss, experts, retain_graph=True)
        idle.append(torch.stack([g.abs().sum((-2, -1)) == 0 for g in grads]))
        return loss

    found = engines.alone(
        model, optimizer, noted, steps, run.world // run.tensor, max_norm=run.max_norm
    )
    return found, torch.stack(idle).unflatten(0, (steps, -1))
