"""GaLore-AdamW over micro-batches whose gradients are kept projected: jobs on real ranks."""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

import ds_ext
from tests.common import engines, models
from tests.common.ranks import identical, message, whole
from tests.distributed import fully_shard_jobs

STEPS, PASSES = 4, 3
HYPERS: dict[str, Any] = {
    "lr": 0.02,
    "rank": 3,
    "update_proj_gap": 2,
    "weight_decay": 0.1,
    "eps": 1e-3,
}
POLICY = {"gradient_policy": "projected"}
ZERO: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "zero.Init": {"stage": 3},
}


def config(stage: dict[str, Any]) -> dict[str, Any]:
    return engines.config(
        **stage,
        gradient_accumulation_steps=PASSES,
        optimizer={"type": "GaLoreAdamW", "params": HYPERS},
        ds_ext=POLICY,
        zero={"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 30},
    )


def batch(step: int, number: int) -> torch.Tensor:
    """The tokens of a micro-batch, for all ranks."""
    return models.batch(PASSES * step + number, dist.get_world_size())


def train(how: str) -> dict[str, Any]:
    """Weights before and after, the rank and weight decay of each parameter, and the norms."""
    return _by_hand(how) if how in ("plain", "FSDP2") else _by_engine(how)


def _told(module: Any, optimizer: Any, norms: list[float], **more: Any) -> dict[str, Any]:
    after = fully_shard_jobs.whole(module) if more.pop("in_parts", False) else whole(module)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    keys = ("rank", "weight_decay")
    return {
        "after": after,
        "identical": identical(after),
        "groups": {
            n: [groups[p][key] for key in keys] for n, p in module.named_parameters() if p in groups
        },
        "norms": norms,
        **more,
    }


def _by_hand(how: str) -> dict[str, Any]:
    """Steps by ``fuse_into_backward``."""
    rank, in_parts = dist.get_rank(), how == "FSDP2"
    model = fully_shard_jobs.shard(fully_shard_jobs.apart()) if in_parts else models.make()
    before = fully_shard_jobs.whole(model) if in_parts else whole(model)
    optimizer = ds_ext.GaLoreAdamW.for_model(model, **HYPERS)
    fused = ds_ext.fuse_into_backward(model, optimizer, bucket_size=300, **POLICY)
    norms = []
    for step in range(STEPS):
        for i in range(PASSES):
            (model(batch(step, i)[rank], step=step) / PASSES).backward()
        optimizer.step()
        norms.append(fused.norm)
    return _told(model, optimizer, norms, before=before, in_parts=in_parts)


def _by_engine(how: str) -> dict[str, Any]:
    made = config(ZERO[how])
    if how == "zero.Init":
        with deepspeed.zero.Init(config_dict_or_path=made):
            model = models.make()
        filled = models.make()
        for p, q in zip(model.parameters(), filled.parameters(), strict=True):
            with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
                p.data.copy_(q.data)
    else:
        model = models.make()
    engine = deepspeed.initialize(model=model, config=made)[0]
    before, norms, refused = whole(engine.module), [], []
    for step in range(STEPS):
        for i in range(PASSES):
            engine.backward(engine(batch(step, i)[dist.get_rank()], step=step))
            if step == 1 and i == 0:
                refused = [
                    message(lambda: engine.save_checkpoint("not written")),
                    message(lambda: safe_get_full_grad(engine.module.up.weight)),
                ]
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return _told(engine.module, engine.optimizer, norms, before=before, refused=refused)
