"""Fused matrices that Muon splits, on real ranks against one process."""

import itertools
import re
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
from tests.common import engines
from tests.common.choose import pairs, params
from tests.common.ranks import REFUSALS, identical
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
    assert identical(after)
    return {"before": before, "after": after}


WAYS = (None, 0, 1, 2, 3, "fsdp2")
QUICK = [("phi3", 2, "fsdp2"), ("gpt2", 2, 2)]
CASES = pairs(itertools.product(KINDS, (2, 3), WAYS), chosen=QUICK)
CLOSE = 1e-3  # what Muon's iteration in fp32 may be off: test_muon.py


@pytest.mark.parametrize("kind, ranks, way", params(CASES, QUICK))
def test_sections_are_stepped_as_in_one_process(kind, ranks, way):
    """There each is a matrix of its own: unit/test_sections.py."""
    got = worlds.run(ranks, train, kind, way)[0]
    split, whole = (alone(kind, ranks, is_split) for is_split in (True, False))
    check(got["after"], split, got["before"], STEPS, CLOSE)
    entries = "|".join(entry["match"] for entry in KINDS[kind][2]["param_groups"])
    fused = {n: p for n, p in whole.items() if re.search(entries, n) and p.requires_grad}
    assert error(got["after"], fused, got["before"]) > 0.1


def alone(kind: str, ranks: int, is_split: bool) -> dict[str, Tensor]:
    """The weights of one process, whose fused matrices are split or not."""
    model, given = model_of(kind), hypers(kind)
    if not is_split:
        del given["param_groups"]
    engines.alone(model, ds_ext.Muon.for_model(model, **given), loss_of, STEPS, ranks)
    return dict(model.named_parameters())


@worlds.on(2)
def test_wrong_sizes_are_refused_on_every_rank():
    words = r"^optimizer.params.param_groups\[0\].split is \[24, 12\], but "
    words += r"model.layers.0.self_attn.qkv_proj.weight has the shape \[48, 24\]"
    with pytest.raises(REFUSALS, match=words):
        entry = {"match": "qkv_proj", "split": [24, 12]}
        start(model_of("phi3"), "phi3", 3, param_groups=[entry])
