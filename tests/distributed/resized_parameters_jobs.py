"""Parameters that are given data of another shape while ranks train them."""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.distributed.fsdp import fully_shard

import ds_ext
from tests.distributed import experts_jobs
from tests.distributed.training_jobs import whole

ROWS, MORE = 10, 16


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(ROWS, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x)).square().mean()


def refused(call: Any) -> str:
    """What a call raises, in words; empty if nothing."""
    try:
        call()
    except (RuntimeError, ValueError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def in_engine(stage: int, policy: str) -> dict[str, Any]:
    """Resizes as transformers' resize_token_embeddings does, after a step of an engine."""
    model = Words()
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "zero_optimization": {"stage": stage},
        "ds_ext": {"gradient_policy": policy},
    }
    optimizer = ds_ext.AdaLomo(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.arange(ROWS)))
    engine.step()
    before = {n: p.clone() for n, p in whole(model).items()}
    model.embed.weight.data = torch.randn(MORE, 6, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        engine.backward(engine(torch.arange(ROWS)))
        engine.step()

    told = refused(step)
    after = whole(model) if stage == 3 else dict(model.named_parameters())
    same = {n: p.shape == before[n].shape and p.equal(before[n]) for n, p in after.items()}
    return {"told": told, "same": same, "rank": dist.get_rank()}


def in_pipeline() -> None:
    """Resizes a weight of the first of two stages; the second raises when the first is gone."""
    layers = [LayerSpec(nn.Linear, 4, 8), LayerSpec(nn.Linear, 8, 3)]
    net = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdaLomo", "params": {"lr": 0.05}},
    }
    engine = deepspeed.initialize(model=net, config=config)[0]
    data = [(torch.randn(5, 4), torch.randn(5, 3))]
    engine.train_batch(iter(data * 2))
    own = net.forward_funcs[0].weight
    if engine.is_first_stage():
        own.data = torch.randn(8, 4 + 2, generator=torch.Generator().manual_seed(1))
        data = [(torch.randn(5, 6), torch.randn(5, 3))]
    before = own.clone()
    try:
        engine.train_batch(iter(data * 2))
    finally:
        print("moved" if not own.equal(before) else "as it was", flush=True)


class Routed(Words):
    """Experts of DeepSpeed, one on each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(6, nn.Linear(6, 6), num_experts=2, ep_size=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.moe(self.embed(x).unsqueeze(0))[0]).square().mean()


def in_experts(stage: int) -> dict[str, Any]:
    """Resizes a weight of a model with experts that ranks divide among themselves."""
    model = Routed()
    config = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": {"stage": stage}}
    groups = [{"params": list(model.parameters()), "name": "all"}]
    optimizer = ds_ext.AdaLomo(split_params_into_different_moe_groups_for_optimizer(groups))
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step() -> None:
        engine.backward(engine(torch.arange(ROWS)))
        engine.step()

    step()
    before = {n: p.clone() for n, p in model.named_parameters()}
    model.embed.weight.data = torch.randn(MORE, 6, generator=torch.Generator().manual_seed(1))
    told = refused(step)
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    return {"told": told, "moved": moved}


def in_autoep(stage: int, where: str) -> dict[str, Any]:
    """Resizes a weight of a model whose experts AutoEP divides, one of its stacks for instance."""
    run = experts_jobs.Run("mixtral", "lomo", stage, ep=2)
    model = experts_jobs.make(run.kind)
    engine = experts_jobs.start(run, model, stage, run.ep)

    def step() -> None:
        engine.backward(experts_jobs.loss_of(engine, 0, dist.get_rank()))
        engine.step()

    step()
    before = {n: p.clone() for n, p in model.named_parameters()}
    name, weight = next((n, p) for n, p in model.named_parameters() if where in n)
    weight.data = torch.cat([weight.data, weight.data])
    told = refused(step)
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    return {"told": told, "moved": moved, "name": name}


def in_fsdp2(fused: bool) -> dict[str, Any]:
    """The same of a model of DTensors; a state of another shape is loaded before that."""
    model = fully_shard(Words())
    optimizer = ds_ext.AdaLomo(model.parameters())
    if fused:
        ds_ext.fuse_into_backward(model, optimizer)
    model(torch.arange(ROWS)).backward()
    optimizer.step()
    before = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
    saved = optimizer.state_dict()
    other = ds_ext.AdaLomo(fully_shard(Larger()).parameters())
    told = refused(lambda: optimizer.load_state_dict(other.state_dict()))
    optimizer.load_state_dict(saved)
    optimizer.state[model.embed.weight]["v"]["row"] = torch.zeros(1, 3)

    def step() -> None:
        model(torch.arange(ROWS)).backward()
        optimizer.step()

    edited = refused(step)
    same = {n: p.full_tensor().equal(before[n]) for n, p in model.named_parameters()}
    return {"told": told, "edited": edited, "same": same}


class Larger(Words):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(MORE, 6)
