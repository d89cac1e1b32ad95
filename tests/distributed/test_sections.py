"""Fused matrices that Muon splits, on real ranks against torch's Muon of separate parameters."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_ext
from tests import worlds
from tests.common import by_role, engines, low_rank
from tests.common.choose import params
from tests.common.ranks import identical, message
from tests.common.ranks import whole as whole_of_engine
from tests.common.updates import check, error
from tests.distributed import fully_shard_jobs

STEPS = 3
SMALL = {"vocab_size": 31, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HIDDEN = SMALL | {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# The model, its config, and the optimizer's keys.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "phi3": (
        "Phi3ForCausalLM",
        HIDDEN | {"intermediate_size": 20, "num_key_value_heads": 2},
        {
            "param_groups": [
                {"match": "qkv_proj", "split": [24, 12, 12]},
                {"match": "gate_up_proj", "split": [20, 20]},
                {"match": "o_proj", "heads": 4},
            ]
        },
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        HIDDEN | {"intermediate_size": 20},
        {"param_groups": [{"match": "query_key_value", "split": [6, 6, 6], "heads": 4}]},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        SMALL | NO_DROPOUT | {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 16},
        {
            "target_modules": ["c_attn", "mlp.c_fc"],
            "param_groups": [{"match": "c_attn", "split": [24, 24, 24], "split_dim": 1}],
        },
    ),
}


def model_of(kind: str) -> nn.Module:
    """The same model on every rank. The gradients of keys' biases are rounding alone: no biases."""
    torch.manual_seed(3)
    name, config, _ = KINDS[kind]
    model_type = getattr(transformers, name)
    model: nn.Module = model_type(model_type.config_class(**config, initializer_range=0.2))
    for n, p in model.named_parameters():
        p.requires_grad_(not n.endswith("bias"))
    return model


def loss_of(model: Any, number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    ids = torch.randint(3, 31, (3, 8), generator=generator)
    return model(input_ids=ids, labels=ids).loss


def hypers(kind: str) -> dict[str, Any]:
    return {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": "fp32"} | KINDS[kind][2]


def start(model: nn.Module, kind: str, stage: int | None, **more: Any) -> Any:
    zero = {"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 30}
    if stage is None:
        return engines.start(model, ds_ext.Muon.for_model(model, **hypers(kind)), None, zero=zero)
    optimizer = {"type": "ds_ext.Muon", "params": hypers(kind) | more}
    return engines.start(model, None, stage, optimizer=optimizer, zero=zero)


def train(kind: str, way: Any) -> dict[str, Any]:
    """Weights before and after. ``way`` is a stage, None for no engine, or "fsdp2"."""
    model = model_of(kind)
    if way == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    engine = start(model, kind, None if way == "fsdp2" else way)
    whole = fully_shard_jobs.whole if way == "fsdp2" else whole_of_engine
    before = whole(model)
    engines.train(engine, loss_of, STEPS)
    after = whole(model)
    told = by_role.told(engine.optimizer, model)
    return {"before": before, "after": after, "identical": identical(after), **told}


def refused(stage: int) -> str:
    """The message for sizes that do not add up."""
    entry = {"match": "qkv_proj", "split": [24, 12]}
    return message(lambda: start(model_of("phi3"), "phi3", stage, param_groups=[entry]))


WAYS = (None, 0, 1, 2, 3, "fsdp2")
CASES = [(kind, ranks, way) for kind in KINDS for ranks in (2, 3) for way in WAYS]
QUICK = {("phi3", 2, "fsdp2"), ("gpt_neox", 3, 2), ("gpt2", 2, 3)}
CLOSE = 1e-3  # what Muon's iteration in fp32 may be off: test_muon.py

# How a matrix consists of others, written with torch's own split.
SECTIONS = {
    ("phi3", "qkv_proj"): lambda x: x.split([24, 12, 12]),
    ("phi3", "gate_up_proj"): lambda x: x.split([20, 20]),
    ("phi3", "o_proj"): lambda x: x.split(6),
    ("gpt_neox", "query_key_value"): lambda x: x.view(4, 18, 24).split(6, 1),
    ("gpt2", "c_attn"): lambda x: x.split([24, 24, 24], 1),
}


class Apart(torch.optim.Optimizer):
    """torch.optim.Muon of copies of a matrix's parts, which are copied back."""

    def __init__(self, p, sections, **hypers):
        self.p, self.sections = p, sections
        self.parts = [nn.Parameter(x.clone().reshape(-1, x.shape[-1])) for x in sections(p.data)]
        self.muon = torch.optim.Muon(self.parts, **hypers)

    @torch.no_grad()
    def step(self):
        for part, g in zip(self.parts, self.sections(self.p.grad), strict=True):
            part.grad = g.clone().view_as(part)
        self.muon.step()
        for part, x in zip(self.parts, self.sections(self.p.data), strict=True):
            x.copy_(part.view_as(x))

    def zero_grad(self):
        self.p.grad = None


def trained(kind, got, ranks, is_split=True):
    """One process, with the mean of the ranks' losses."""
    model, made = model_of(kind), []
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for name, p in named.items():
        own, lr, decay = got["groups"][name]
        layer = name.split(".")[-2]
        if own == "AdamW":
            made.append(torch.optim.AdamW([p], lr=lr, weight_decay=decay))
        elif is_split and (kind, layer) in SECTIONS:
            made.append(Apart(p, SECTIONS[kind, layer], lr=lr, weight_decay=decay))
        else:
            made.append(torch.optim.Muon([p], lr=lr, weight_decay=decay))
    with low_rank.in_dtype(torch.float64):
        for step in range(STEPS):
            losses = [loss_of(model, step, rank) for rank in range(ranks)]
            torch.stack(losses).mean().backward()
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
    assert is_split == any(isinstance(x, Apart) for x in made)
    return named


@pytest.mark.parametrize("kind, ranks, way", params(CASES, QUICK))
def test_sections_are_stepped_as_separate_parameters(kind, ranks, way):
    got = worlds.run(ranks, train, kind, way)[0]
    assert got["identical"]
    after = trained(kind, got, ranks)
    check(got["after"], after, got["before"], STEPS, CLOSE)
    whole = trained(kind, got, ranks, is_split=False)
    fused = {n: p for n, p in whole.items() if (kind, n.split(".")[-2]) in SECTIONS}
    assert error(got["after"], fused, got["before"]) > 0.1


def test_wrong_sizes_are_refused_on_every_rank():
    for said in worlds.run(2, refused, 3):
        assert said.startswith(
            "optimizer.params.param_groups[0].split is [24, 12], but "
            "model.layers.0.self_attn.qkv_proj.weight has the shape [48, 24]"
        )
