"""``"split": "auto"``: the sections of transformers' models, found by what the models compute.

A section is zeroed, and the input of the next layer shows which projection it was.
"""

import logging
import types

import pytest
import torch
import transformers
from accelerate.utils import DeepSpeedPlugin
from torch import nn

import ds_ext
from ds_ext.optimizer import sections

LM = {"vocab_size": 31, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HIDDEN = LM | {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
MLP = {"intermediate_size": 20}
GPT2 = LM | {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 16}
DBRX = {"d_model": 24, "n_heads": 4, "n_layers": 2, "max_seq_len": 16}
DBRX_MORE = {
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 1e3},
    "ffn_config": {"ffn_hidden_size": 20, "moe_num_experts": 2, "moe_top_k": 1},
}
BIGCODE = GPT2 | {"attn_pdrop": 0.0, "scale_attention_softmax_in_fp32": False}
# The config of a causal model; the names of its fused and next layer; the order of the sections.
ATTENTION = {
    "phi3": ("Phi3", HIDDEN | MLP | {"num_key_value_heads": 2}, "qkv_proj", "o_proj", "qkv"),
    "gpt_neox": ("GPTNeoX", HIDDEN | MLP, "query_key_value", "attention.dense", "qkv"),
    "bloom": ("Bloom", HIDDEN, "query_key_value", "self_attention.dense", "qkv"),
    "falcon": ("Falcon", HIDDEN, "query_key_value", "self_attention.dense", "qkv"),
    "falcon per head": (
        *("Falcon", HIDDEN | {"multi_query": False}),
        *("query_key_value", "self_attention.dense", "qkv"),
    ),
    "falcon in groups": (
        *("Falcon", HIDDEN | {"new_decoder_architecture": True, "num_kv_heads": 2}),
        *("query_key_value", "self_attention.dense", "qkv"),
    ),
    "gpt2": ("GPT2", GPT2, "c_attn", "attn.c_proj", "qkv"),
    "mpt": ("Mpt", LM | DBRX, "Wqkv", "out_proj", "qkv"),
    "persimmon": (
        *("Persimmon", HIDDEN | MLP | {"hidden_size": 32}),
        *("query_key_value", "self_attn.dense", "qkv"),
    ),
    "bigcode": ("GPTBigCode", BIGCODE, "c_attn", "attn.c_proj", "qkv"),
    "bigcode per head": (
        *("GPTBigCode", BIGCODE | {"multi_query": False}, "c_attn", "attn.c_proj", "qkv"),
    ),
    "codegen": ("CodeGen", GPT2 | {"rotary_dim": 4}, "qkv_proj", "out_proj", "qvk"),
    "dbrx": ("Dbrx", LM | DBRX | DBRX_MORE, "Wqkv", "out_proj", "qkv"),
    "modernbert": ("ModernBert", HIDDEN | MLP, "Wqkv", "attn.Wo", "qkv"),
    "imagegpt": ("ImageGPT", GPT2, "c_attn", "attn.c_proj", "qkv"),
    "openai": ("OpenAIGPT", GPT2, "c_attn", "attn.c_proj", "qkv"),
}
HEADS = {"ModernBert": "ModernBertForMaskedLM", "ImageGPT": "ImageGPTModel"}
HEADS |= {"OpenAIGPT": "OpenAIGPTLMHeadModel", "GPT2": "GPT2LMHeadModel"}


def made(kind, config):
    torch.manual_seed(0)
    own = getattr(transformers, f"{kind}Config")(**config, attn_implementation="eager")
    model = getattr(transformers, HEADS.get(kind, f"{kind}ForCausalLM"))(own).double().eval()
    for name, p in model.named_parameters():
        if "norm" not in name and "ln" not in name:
            nn.init.zeros_(p) if name.endswith("bias") else nn.init.normal_(p, std=0.3)
    return model


def split_keys(model, match):
    """The keys that an optimizer's group has for the one kind of matrix that ``match`` names."""
    optimizer = ds_ext.Muon.for_model(model, split="auto", target_modules=[match])
    names = {p: n for n, p in model.named_parameters()}
    groups = [
        {key: group[key] for key in ("split", "heads", "split_dim")}
        for group in optimizer.param_groups
        if any(match in names[p] for p in group["params"]) and group.get("split")
    ]
    assert len(groups) == 1 and groups[0]["split"] != "auto"
    return groups[0]


def indices(keys, shape):
    """The elements of each section, by torch's split instead of ds_ext's sections."""
    x = torch.arange(shape[0] * shape[1]).view(shape)
    x = x if keys["split_dim"] == 0 else x.T
    parts = x.view(keys["heads"] or 1, -1, x.shape[1]).split(list(keys["split"]), 1)
    return [part.flatten() for part in parts]


def zeroed(weight, *some):
    """A copy of a weight without some of its elements."""
    weight = weight.detach().clone()
    for at in some:
        weight.view(-1)[at] = 0
    return weight


@pytest.mark.parametrize("name", ATTENTION)
def test_the_sections_of_a_fused_qkv_are_query_key_and_value(name):
    kind, config, fused, following, order = ATTENTION[name]
    model = made(kind, config)
    weight = next(p for n, p in model.named_parameters() if f"{fused}.weight" in n)
    (layer,) = [m for n, m in model.named_modules() if n.endswith(following)][:1]
    keys = split_keys(model, f"{fused}.weight")
    at = dict(zip(order, indices(keys, weight.shape), strict=True))
    ids, seen = torch.arange(3, 13).view(1, -1), []
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))

    def attended(*without, noise=None):
        """What attention gives to its output layer; ``noise`` redraws a section."""
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(zeroed(kept, *(at[x] for x in without)))
            if noise:
                weight.view(-1)[at[noise]] = torch.randn(len(at[noise])).double()
            model(ids)
            weight.copy_(kept)
        return seen.pop()

    assert not attended("v").any() and attended().any()
    for one, other in ("qk", "kq"):  # without queries, keys make no difference, and vice versa
        assert torch.allclose(attended(one, noise=other), attended(one), atol=1e-12)
        assert not torch.allclose(attended(noise=other), attended(), atol=1e-3)


GATED = {
    "phi3": ("Phi3", HIDDEN | MLP | {"num_key_value_heads": 2}, "mlp.down_proj"),
    "glm": ("Glm", HIDDEN | MLP | {"num_key_value_heads": 2, "head_dim": 6}, "mlp.down_proj"),
}


@pytest.mark.parametrize("name", GATED)
def test_the_sections_of_gate_up_are_both_projections(name):
    kind, config, following = GATED[name]
    model = made(kind, config)
    weight = next(p for n, p in model.named_parameters() if "gate_up_proj" in n)
    (layer,) = [m for n, m in model.named_modules() if n.endswith(following)][:1]
    seen = []
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    kept = weight.detach().clone()
    for at in indices(split_keys(model, "gate_up_proj"), weight.shape):
        with torch.no_grad():
            weight.copy_(zeroed(kept, at))
            model(torch.arange(3, 13).view(1, -1))
        assert not seen.pop().any()
    with torch.no_grad():
        weight.copy_(kept)
        model(torch.arange(3, 13).view(1, -1))
    assert seen.pop().all()


MOE = HIDDEN | MLP | {"num_key_value_heads": 2, "head_dim": 6, "num_experts_per_tok": 2}
EXPERTS = {"mixtral": ("Mixtral", MOE | {"num_local_experts": 3})}
EXPERTS |= {"gpt_oss": ("GptOss", MOE | {"num_local_experts": 3})}
EXPERTS |= {"llama4": ("Llama4Text", MOE | {"num_local_experts": 3, "intermediate_size_mlp": 16})}


@pytest.mark.parametrize("name", EXPERTS)
def test_the_sections_of_experts_gates_are_those_of_each_expert(name):
    kind, config = EXPERTS[name]
    HEADS["Llama4Text"] = "Llama4ForCausalLM"
    model = made(kind, config).float()
    experts = next(m for n, m in model.named_modules() if n.endswith("experts"))
    weight = experts.gate_up_proj
    keys = split_keys(model, "experts.gate_up_proj")
    gate, up = indices(keys, weight.shape[1:])
    assert len(gate) == len(up) == weight[0].numel() // 2
    seen, x = [], torch.randn(6, 24)
    routed = (torch.randint(3, (6, 2)), torch.rand(6, 2))
    if name == "llama4":
        x, routed = torch.randn(3 * 6, 24), ()
    for without in ((), gate, up):
        kept = weight.detach().clone()
        with torch.no_grad():
            for i in range(3):
                weight[i].view(-1)[list(without)] = 0
            seen.append(experts(x, *routed).abs().sum())
            weight.copy_(kept)
    assert seen[0] > 0 and seen[1] == 0
    assert (seen[2] == 0) == (name != "gpt_oss")  # which adds 1 to the other


class ChatGLM(nn.Module):
    """The layers of ChatGLM's own code, cut as it cuts them."""

    def __init__(self, multi):
        super().__init__()
        config = {"model_type": "chatglm", "num_attention_heads": 4, "hidden_size": 24}
        config |= {"multi_query_attention": multi, "multi_query_group_num": 2, "kv_channels": 6}
        self.config = types.SimpleNamespace(**config)
        self.query_key_value = nn.Linear(24, 24 + 2 * 12 if multi else 72, bias=False)
        self.dense_h_to_4h = nn.Linear(24, 40, bias=False)

    def mixed(self, x):
        """Query, key and value, as modeling_chatglm.py's SelfAttention.forward cuts them."""
        x = self.query_key_value(x)
        if self.config.multi_query_attention:
            return x.split([4 * 6, 2 * 6, 2 * 6], dim=-1)
        return x.view(*x.shape[:-1], 4, 3 * 6).chunk(3, dim=-1)


@pytest.mark.parametrize("multi", [True, False])
def test_chatglms_own_code(multi):
    model = ChatGLM(multi)
    keys = split_keys(model, "query_key_value")
    weight = model.query_key_value.weight
    for i, at in enumerate(indices(keys, weight.shape)):
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(zeroed(kept, at))
            mixed = model.mixed(torch.randn(5, 24))
            weight.copy_(kept)
        assert [bool(x.any()) for x in mixed] == [j != i for j in range(3)]
    assert split_keys(model, "dense_h_to_4h")["split"] == (20, 20)


def test_a_model_of_an_unknown_kind_is_stepped_as_a_whole():
    model = ChatGLM(True)
    model.config = types.SimpleNamespace(model_type="a later one")
    optimizer = ds_ext.Muon.for_model(model, split="auto")
    assert not any(sections.are_set(optimizer.rule_of(p)) for p in model.parameters())


def test_the_log_tells_what_was_found_and_what_is_unknown(caplog):
    model = made(*ATTENTION["gpt_neox"][:2])
    model.extra = nn.ModuleDict({"qkv": nn.Linear(8, 24)})
    with caplog.at_level(logging.INFO, "ds_ext"):
        optimizer = ds_ext.Muon.for_model(model, split="auto")
    (line,) = [r.getMessage() for r in caplog.records if "auto" in r.getMessage()]
    assert line == (
        '"split": "auto" found gpt_neox.layers.*.attention.query_key_value.weight (2): '
        "split [6, 6, 6], heads 4; of unknown sizes, stepped as a whole: extra.qkv.weight"
    )
    assert optimizer.defaults["split"] is None
    of = {p: group for group in optimizer.param_groups for p in group["params"]}
    assert not sections.are_set(optimizer.rule_of(model.extra["qkv"].weight))
    assert "split" not in of[model.extra["qkv"].bias]


def test_accelerate_leaves_auto_in_an_entry_as_it_is():
    """HF Trainer's engine, too, fills in "auto" by this function: at the top it knows no split."""
    entry = {"match": "qkv_proj|gate_up_proj", "split": "auto"}
    for params in ({"param_groups": [entry]}, {"split": "auto"}):
        config = {"zero_optimization": {"stage": 3}, "optimizer": {"params": params}}
        plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)
        if "split" in params:
            with pytest.raises(ValueError, match="`optimizer.params.split` not found"):
                plugin.deepspeed_config_process(must_match=False)
        else:
            plugin.deepspeed_config_process(must_match=False)
            assert plugin.deepspeed_config["optimizer"]["params"] == {"param_groups": [entry]}
    model = made(*ATTENTION["phi3"][:2])
    optimizer = ds_ext.Muon.for_model(model, param_groups=[entry])
    splits = {optimizer.group_of[p].get("split") for p in model.parameters()}
    assert splits == {None, (24, 12, 12), (20, 20)}


def test_auto_without_a_config_is_refused():
    model = nn.Sequential(nn.Linear(4, 12))
    with pytest.raises(ValueError, match='^split is "auto", which needs a model with a config'):
        ds_ext.Muon.for_model(model, split="auto")
    optimizer = ds_ext.Muon([model[0].weight], split="auto")
    model[0].weight.grad = torch.ones(12, 4)
    with pytest.raises(ValueError, match=r"split is 'auto', but parameter 0 .* for_model"):
        optimizer.step()
