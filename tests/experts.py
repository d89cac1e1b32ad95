"""Runs of Hugging Face's mixtures of experts on real ranks, whose routing leaves experts idle.

Usage: python -m tests.experts OUT.pt [REGEX of runs]
"""

import re
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM, MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

import ds_ext
from ds_ext import stacks
from ds_ext.optimizer import OPTIMIZERS
from tests import forks
from tests.training import HYPERS, whole

STEPS = 8
VOCAB = 31
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "num_experts_per_tok": 2,
    "initializer_range": 0.15,
}
KINDS = {
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig,
        {"intermediate_size": 10, "num_local_experts": 4},
    ),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig, {"intermediate_size": 10, "num_local_experts": 4}),
    "qwen3": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {"moe_intermediate_size": 10, "num_experts": 4}),
}


@dataclass(frozen=True)
class Run:
    kind: str
    rule: str
    stage: int | None  # None: fuse_into_backward, no engine
    world: int = 2
    max_norm: float = 0.0
    policy: str = "fused"
    leaves: bool = False  # named here, beside those that DeepSpeed knows
    broken: bool = False  # a checkpoint, and the rest of the steps by another engine, at stage 1

    @property
    def hypers(self) -> dict[str, Any]:
        return HYPERS[self.rule] | {"weight_decay": 0.1}


def _runs() -> dict[str, Run]:
    made = {}
    for rule in HYPERS:
        made[f"mixtral-{rule}-stage3"] = Run("mixtral", rule, 3, leaves=rule == "lomo")
    for stage in (None, 0, 1, 2):
        name = "plain" if stage is None else f"stage{stage}"
        made[f"mixtral-came-{name}"] = Run("mixtral", "came", stage)
    for stage in (1, 3):
        made[f"mixtral-clip-stage{stage}"] = Run("mixtral", "adalomo", stage, max_norm=0.5)
        made[f"qwen3-stage{stage}"] = Run("qwen3", "adalomo", stage)
        made[f"gpt-oss-stage{stage}"] = Run("gpt-oss", "adafactor", stage)
    made["mixtral-clip-sharded"] = Run("mixtral", "came", 3, max_norm=0.5, policy="sharded")
    made["mixtral-resumed"] = Run("mixtral", "came", 3, broken=True)
    made["mixtral-ranks4"] = Run("mixtral", "adalomo", 3, 4)
    made["qwen3-ranks4"] = Run("qwen3", "lamb", 2, 4)
    return made


RUNS = _runs()


def make(kind: str) -> nn.Module:
    model_type, config_type, sizes = KINDS[kind]
    torch.manual_seed(7)
    config = config_type(**SIZES, **sizes)
    config._experts_implementation = "eager"
    model = model_type(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(0, 0.1)
    return model.train()


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Of few tokens, so that experts are idle; of many in the first step, so that none is."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    shape = (1, 4) if step else (8, 6)
    tokens = torch.randint(0, 2 if step % 3 == 2 else VOCAB, shape, generator=generator)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def start(run: Run, model: nn.Module, stage: int | None):
    optimizer = OPTIMIZERS[run.rule](model.parameters(), **run.hypers)
    if stage is None:
        return ds_ext.fuse_into_backward(model, optimizer, bucket_size=700)
    if run.leaves:
        set_z3_leaf_modules(model, [MixtralSparseMoeBlock])
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": run.max_norm,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 700,
            "stage3_param_persistence_threshold": 30,
        },
        "ds_ext": {"gradient_policy": run.policy},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]


def train(run: Run) -> dict[str, Any]:
    """Runs on this rank -> initial and final weights, and what was stepped."""
    model = make(run.kind)
    engine = start(run, model, run.stage)
    before = whole(model)
    for step in range(STEPS):
        if run.broken and step == STEPS // 2:
            engine = moved(engine, run)
            model = engine.module
        if run.stage is None:
            engine.backward(loss_of(model, step, dist.get_rank()))
            engine.optimizer.step()
        else:
            engine.backward(loss_of(engine, step, dist.get_rank()))
            engine.step()
    stepped = {n: p for n, p in model.named_parameters() if p in stacks.find(model)}
    optimizer = engine.optimizer if run.stage is None else engine.optimizer.optimizer
    kept = {n: sorted(optimizer.state[p].get(stacks.EXPERTS, ())) for n, p in stepped.items()}
    after = whole(model)
    low, high = (torch.cat([t.flatten() for t in after.values()]) for _ in range(2))
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return {"before": before, "after": after, "kept": kept, "drift": float((high - low).max())}


def moved(engine, run: Run):
    """What goes on from a checkpoint of ``engine``."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    engine.save_checkpoint(folder[0])
    other = start(run, make(run.kind), 1)
    other.load_checkpoint(folder[0])
    return other


def reference(run: Run, optimizer_of) -> tuple[nn.Module, list[torch.Tensor]]:
    """One process with the global batch, each expert a parameter of its own -> the model, and
    which experts were idle on each rank: [steps, ranks, stacks, experts].

    In fp64 for GaLore, whose authors' SVD would be less exact than what is compared with it.
    """
    model = make(run.kind)
    model = model.double() if run.rule == "galoreadamw" else model
    stacked = [p for p in model.parameters() if p in stacks.find(model)]
    others = [p for p in model.parameters() if p not in stacks.find(model)]
    each = [[nn.Parameter(e) for e in p.data] for p in stacked]  # in the same memory
    params = [*others, *(e for own in each for e in own)]
    hypers = {k: v for k, v in run.hypers.items() if k != "weight_decay"}
    optimizer = optimizer_of(run.rule, [{"params": params, "weight_decay": 0.1}], hypers)
    idle = []
    for step in range(STEPS):
        model.zero_grad()
        seen = []
        for rank in range(run.world):
            (loss_of(model, step, rank) / run.world).backward()
            sums = torch.stack([p.grad.abs().flatten(1).sum(1) for p in stacked if p.dim() > 2])
            seen.append(sums)
        seen = torch.stack(seen)  # grows with the ranks
        idle.append(torch.cat([seen[:1], seen[1:] - seen[:-1]]) == 0)
        for p, own in zip(stacked, each, strict=True):
            for e, g in zip(own, p.grad, strict=True):
                e.grad = g
        if run.max_norm:
            torch.nn.utils.clip_grad_norm_(params, run.max_norm)
        optimizer.step()
    return model, torch.stack(idle)


def main() -> None:
    chosen = re.compile(sys.argv[2] if len(sys.argv) > 2 else "")
    results = {}
    for world in (2, 4):
        runs = {n: r for n, r in RUNS.items() if r.world == world and chosen.search(n)}
        if runs:
            results |= every(world, runs)
    torch.save(results, sys.argv[1])


def every(world: int, runs: dict[str, Run]) -> dict[str, Any]:
    ended = forks.run(world, lambda: {n: train(r) for n, r in runs.items()})
    for rank, end in enumerate(ended):
        assert end.code == 0, f"rank {rank}: {end.output[-3000:]}"
    return ended[0].result


if __name__ == "__main__":
    main()
