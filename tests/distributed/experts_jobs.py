"""Runs of Hugging Face's mixtures of experts on real ranks, whose routing leaves experts idle."""

from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM, MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from ds_ext.engine import expert_parallel, parameters
from ds_ext.optimizer import expert_stacks
from tests.common import by_role, engines
from tests.common.hypers import FOR_ALL
from tests.common.ranks import whole
from tests.distributed import mixtures
from tests.distributed.mixtures import Run
from tests.distributed.test_tensor_parallel import rebuilt

STEPS = 6
VOCAB = 31
ALIKE = 20  # tokens from here on go to the experts 2 and 3, all that a rank may have
SIZES = {"vocab_size": VOCAB, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 6, "num_experts_per_tok": 2}
SIZES |= {"initializer_range": 0.15}
KINDS = {
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig,
        {"intermediate_size": 10, "num_local_experts": 4},
    ),
    "divided": (
        MixtralForCausalLM,
        MixtralConfig,
        {"intermediate_size": 10, "num_local_experts": 4, "num_key_value_heads": 2},
    ),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig, {"intermediate_size": 10, "num_local_experts": 4}),
    "qwen3": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {"moe_intermediate_size": 10, "num_experts": 4}),
}

# DeepSpeed divides no layers of these models by the plan that Hugging Face has for them.
LAYERS = [
    {"patterns": [r".*[qkv]_proj\.weight$"], "partition_type": "column"},
    {"patterns": [r".*o_proj\.weight$"], "partition_type": "row"},
]


def _runs() -> dict[str, Run]:
    made = {}
    for rule in FOR_ALL:
        # SinkGD brings every row to one size. Mixtral divides the probabilities of the two experts
        # by their sum, so the gradient of the others' rows of a router is rounding alone.
        kind = "qwen3" if rule == "sinkgd" else "mixtral"
        made[f"{kind}-{rule}-stage3"] = Run(kind, rule, 3, leaves=rule == "lomo")
    for stage in (None, 0, 1, 2):
        name = "plain" if stage is None else f"stage{stage}"
        made[f"mixtral-came-{name}"] = Run("mixtral", "came", stage)
    made["mixtral-clip-stage1"] = Run("mixtral", "adalomo", 1, max_norm=0.5)
    made["qwen3-stage3"] = Run("qwen3", "adalomo", 3)
    made["gpt-oss-stage3"] = Run("gpt-oss", "adafactor", 3)
    made["mixtral-clip-sharded"] = Run("mixtral", "came", 3, max_norm=0.5, policy="sharded")
    made["mixtral-resumed"] = Run("mixtral", "came", 3, then=(1, 0))
    for stage, world, ep in ((3, 2, 2), (0, 2, 2), (1, 4, 2), (3, 4, 1), (3, 4, 2)):
        name = f"autoep-stage{stage}-ranks{world}-ep{ep}"
        made[name] = Run("mixtral", "came", stage, world, ep)
    for rule in ("lomo", "adalomo", "lamb"):
        made[f"autoep-{rule}"] = Run("mixtral", rule, 3, ep=2, max_norm=0.5 * (rule == "lomo"))
    made["autoep-scale"] = Run("mixtral", "scale", 3, ep=2)
    for i, rule in enumerate(("apollo", "apollomini", "muon")):  # of which a config says the rest
        made[f"qwen3-{rule}-stage3"] = Run("qwen3", rule, 3, json=True)
        made[f"autoep-json-{rule}"] = Run("mixtral", rule, 1 + i, ep=2, json=True)
        made[f"autoep-tensor-{rule}"] = Run("divided", rule, 1 + i, 4, ep=2, tensor=2, json=True)
    for stage in (None, 0, 1, 2):
        made[f"qwen3-muon-{stage}"] = Run("qwen3", "muon", stage, max_norm=0.5, json=True)
    for rule in ("apollo", "apollomini"):
        made[f"autoep-tensor-{rule}-3"] = Run("divided", rule, 3, 4, ep=2, tensor=2, json=True)
    for stage in (0, 1):
        made[f"autoep-json-muon-{stage}"] = Run("mixtral", "muon", stage, ep=2, json=True)
    made["autoep-muon-resumed"] = Run("mixtral", "muon", 2, ep=2, then=(0, 1), json=True)
    made["autoep-qwen3"] = Run("qwen3", "adalomo", 2, ep=2)
    made["autoep-sharded"] = Run("mixtral", "came", 3, max_norm=0.5, policy="sharded", ep=2)
    made["autoep-resumed"] = Run("mixtral", "came", 3, ep=2, then=(1, 1))
    for stage, rule in enumerate(("lomo", "came", "adalomo", "galoreadamw")):
        ep = 4 if stage == 1 else 2
        made[f"autoep-tensor-{rule}"] = Run("divided", rule, stage, 4, ep=ep, tensor=2)
    made["autoep-tensor-lomo-stage3"] = Run("divided", "lomo", 3, 4, ep=4, tensor=2)
    made["autoep-tensor-clip"] = Run("divided", "adalomo", 1, 4, max_norm=0.5, ep=2, tensor=2)
    made["autoep-tensor-resumed"] = Run("divided", "came", 3, 4, ep=2, then=(1, 4), tensor=2)
    made["mixtral-ranks4"] = Run("mixtral", "adalomo", 3, 4)
    made["qwen3-ranks4"] = Run("qwen3", "lamb", 2, 4)
    return made


RUNS = _runs()


def make(kind: str) -> nn.Module:
    model_type, config_type, sizes = KINDS[kind]
    torch.manual_seed(7)
    config = config_type(**SIZES | sizes)
    config._experts_implementation = "eager"
    model = model_type(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(0, 0.1)
            if name.endswith("embed_tokens.weight"):
                p[ALIKE:, 0] += 0.6
            if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                p[:, 0] = torch.tensor([-0.6, -0.6, 0.6, 0.6])
    return model.train()


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Of few tokens, so that experts are idle; of many in the first step, so that none is."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    shape = (1, 4) if step else (8, 6)
    tokens = torch.randint(ALIKE if step % 3 == 2 else 0, VOCAB, shape, generator=generator)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def start(run: Run, stage: int | None, ep: int) -> Any:
    model = make(run.kind)
    if run.leaves:
        set_z3_leaf_modules(model, [MixtralSparseMoeBlock])
    grouped = {"use_grouped_mm": False, "load_balance_coeff": None}
    more = {"expert_parallel": {"enabled": True, "autoep_size": ep} | grouped} if ep else {}
    return mixtures.start(run, model, stage, 700, LAYERS, **more)


def train(run: Run) -> dict[str, Any]:
    engine, found = mixtures.trained(run, start, loss_of, STEPS)
    model, state = engine.module, engine.optimizer.state
    return found | {
        "after": by_matrix(model, assembled(model)),
        "kept": {len(state[p].get(expert_stacks.EXPERTS, ())) for p in stacked(model)},
        "streams": streams_of(model, engine.optimizer),
    }


def assembled(model: nn.Module) -> dict[str, torch.Tensor]:
    own = whole(model)
    return {n: rebuilt(p, own[n]) for n, p in model.named_parameters()}


def recorded(kind: str) -> list[tuple[int, ...]]:
    """The shapes of the routers' logits that a model records once AutoEP has replaced them."""
    engine = start(Run(kind, "lomo", 2, ep=2), 2, 2)
    tokens = torch.arange(6).view(1, 6)
    with torch.no_grad():
        seen = engine(input_ids=tokens, output_router_logits=True, use_cache=False).router_logits
    return [tuple(logits.shape) for logits in seen]


def streams_of(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """The streams of random numbers that an optimizer keeps, those of each expert apart."""
    names = {p: n for n, p in model.named_parameters()}
    found = by_role.streams_of(optimizer, names)
    for p in stacked(model):
        for e, kept in optimizer.state[p].get(expert_stacks.EXPERTS, {}).items():
            if "stream" in kept:
                found[f"{names[p]}.{e}"] = int(kept["stream"])
    return {n.replace("router.gate", "gate"): stream for n, stream in found.items()}


def stacked(model: nn.Module) -> set[torch.Tensor]:
    """The parameters that stack experts, partitioned or not."""
    return expert_stacks.find(model, parameters.unpartitioned_shape)


def by_matrix(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights under Hugging Face's names, stacked experts apart and numbered over all ranks."""
    stacks = {n: p for n, p in model.named_parameters() if p in stacked(model)}
    found = {}
    for name, w in weights.items():
        if name in stacks:
            place = expert_parallel.stack_position(stacks[name])
            found |= {f"{name}.{e}": own for e, own in enumerate(w, place[0] if place else 0)}
        else:
            found[name.replace("router.gate", "gate")] = w
    return found


def apart(name: str, stack: torch.Tensor, ep: int) -> dict[str, torch.Tensor]:
    """The matrices of a stack of Hugging Face's; AutoEP keeps the halves of a fused one apart."""
    if not ep:
        return {f"{name}.{e}": w for e, w in enumerate(stack)}
    if "down_proj" in name:
        return apart(name.replace("down_proj", "w2"), stack, 0)
    gate, up = stack.chunk(2, 1)
    w1, w3 = (name.replace("gate_up_proj", w) for w in ("w1", "w3"))
    return apart(w1, gate, 0) | apart(w3, up, 0)


def reference(run: Run, streams: dict[str, int]) -> tuple[engines.Alone, torch.Tensor]:
    """One process with the global batch, each expert a parameter of its own; and its idle experts.

    In fp64 for GaLore, whose authors' SVD would be less exact than what is compared with it, and
    for LAMB, which makes as much of small gradients as of large ones.
    """
    model = make(run.kind)
    model = model.double() if run.rule in ("galoreadamw", "lamb") else model
    stacks = {n: p for n, p in model.named_parameters() if p in expert_stacks.find(model)}
    named = {n: p for n, p in model.named_parameters() if n not in stacks}
    for name, stack in stacks.items():  # in the same memory
        own = {n: nn.Parameter(w) for n, w in apart(name, stack.data, run.ep).items()}
        named |= own

        def hand_over(p: torch.Tensor, name: str = name, own: dict[str, Any] = own) -> None:
            for n, g in apart(name, p.grad, run.ep).items():
                own[n].grad = g.contiguous()
            p.grad = None

        stack.register_post_accumulate_grad_hook(hand_over)
    before = {n: p.detach().clone() for n, p in named.items()}
    # The router's matrix, which AutoEP makes a linear layer, too.
    linear = r"_proj\.|experts\.|mlp\.gate" if run.ep else r"_proj\.|experts\."
    optimizer = mixtures.optimizer(run, named, linear, streams)
    matrices = [p for p in stacks.values() if p.dim() > 2]
    found, idle = mixtures.alone(run, model, optimizer, loss_of, STEPS, matrices)
    after = {n: p.detach() for n, p in named.items()}
    return engines.Alone(before, after, found.norms), idle
