"""Pairs of ranks that share the layers of a model (AutoTP) or its sequences (Ulysses), alone or two
by two of data parallelism: against the same training by the authors' optimizers in one process."""

import json
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint import constants
from deepspeed.checkpoint.affine import ParamAffineMap
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.utils import groups
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import ds_ext  # noqa: F401
from ds_ext.engine import autotp
from tests import worlds
from tests.common import by_role, engines, hypers, updates
from tests.common.choose import pairs, params
from tests.common.hypers import Table
from tests.common.ranks import shared_folder, whole
from tests.distributed import test_ulysses
from tests.tools.support import of

VOCAB, STEPS = 37, 4
SMALL = {name: {"lr": 5e-4} for name in ("came", "lion")} | {"apollomini": {"lr": 1e-3}}
LARGE = {"lomo": {"lr": 0.05}, "sinkgd": {"lr": 0.1}}
RANKS = {name: {"rank": 4} for name in ("galoreadamw", "apollo")}
HYPERS = Table({"lr": 5e-3}, {"muon": {"ns_dtype": "fp32"}} | SMALL | LARGE | RANKS)
OURS: dict[str, dict[str, Any]] = {
    "adafactor": {"relative_step": False},
    "galoreadamw": {"nbits": 32, "update_proj_gap": 200, "target_modules": ["."]},
}
DIVIDED = ("adalomo", "adafactor", "came", "lamb", "galoreadamw", "adamw", "lion")


@dataclass
class Case:
    model: str  # "sequences": that of test_ulysses
    rule: str
    stage: int
    more: dict[str, Any] = field(default_factory=dict)  # settings of the engine
    dropout: float = 0.0
    saved: bool = False  # and loaded half-way, by another engine
    gas: int = 1

    @property
    def hypers(self) -> dict[str, Any]:
        # A gradient that is too large by a factor changes LOMO's update, but none of the others'.
        of_sequences = {"lomo": {"lr": 1.0}, "sinkgd": {"lr": 0.05}}
        own = of_sequences.get(self.rule, {}) if self.model == "sequences" else {}
        return HYPERS[self.rule] | own

    @property
    def settings(self) -> tuple[Any, ...]:
        """All that may interact, for ``choose.pairs``."""
        kinds = self.model, self.stage, self.max_norm > 0, self.dropout > 0
        return *kinds, self.saved, self.gas, self.more is SHIPPED

    @property
    def max_norm(self) -> float:
        return self.more.get("gradient_clipping", 0.0)


CASES = {
    f"{model}-{rule}-{stage}": Case(model, rule, stage)
    for model in ("llama", "bert")
    for rule in DIVIDED
    for stage in (range(4) if rule in DIVIDED[:5] else (1, 3))
    if model == "llama" or DIVIDED.index(rule) in (stage, stage + 4)  # BERT at one stage by each
}
LAYERS = [{"patterns": [r"qkv\.weight$"], "partition_type": "column", "shape": [3, -1]}]
LAYERS += [{"patterns": [r"gate_up\.weight$"], "partition_type": "column", "shape": [2, -1]}]
LAYERS += [{"patterns": [r"(out|down)\.weight$"], "partition_type": "row"}]
FUSED = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {"use_default_specs": False, "layer_specs": LAYERS},
    }
}
CASES |= {f"fused-{s}": Case("fused", "came", s) for s in range(4)}
CASES |= {f"tied-{s}": Case("tied", "adalomo", s) for s in range(4)}
CASES |= {f"llama-lomo-{stage}": Case("llama", "lomo", stage) for stage in (0, 3)}
SHIPPED = json.loads((worlds.ROOT / "configs" / "adalomo_zero1_tp2.json").read_text())
SHIPPED = {key: SHIPPED[key] for key in ("tensor_parallel", "zero_optimization")}
CASES["shipped-config"] = Case("llama", "adalomo", 1, SHIPPED)
CASES |= {f"llama-muon-{stage}": Case("llama", "muon", stage) for stage in range(4)}
for i, rule in enumerate(("apollo", "apollomini", "scale", "sinkgd", "flashadamw")):
    stages = range(4) if i < 2 else {i % 3, 3}
    CASES |= {f"llama-{rule}-{stage}": Case("llama", rule, stage) for stage in stages}
CASES["fused-muon"] = Case("fused", "muon", 1)
CLIP = {"gradient_clipping": 0.1}
CASES |= {f"clip-muon-{s}": Case("llama", "muon", s, CLIP) for s in range(4)}
CASES["accumulate-muon"] = Case("llama", "muon", 2, CLIP, gas=2)
CASES["resume-muon"] = Case("llama", "muon", 1, saved=True)
CASES |= {f"clip-{s}": Case("bert", "adalomo", s, CLIP) for s in range(4)}
CASES |= {f"accumulate-{s}": Case("llama", "came", s, CLIP, gas=2) for s in (0, 2, 3)}
CASES |= {f"resume-{s}": Case("llama", "came", s, saved=True) for s in range(4)}
CASES |= {f"dropout-{s}": Case("bert", "came", s, dropout=0.3) for s in range(4)}
SEQUENCES = [(rule, stage) for rule in ("lomo", "adalomo", "came") for stage in (1, 2, 3)]
SEQUENCES += [("lomo", 0), ("adamw", 2), ("sinkgd", 3), ("came", 0), ("galoreadamw", 3)]
SEQUENCES += [("muon", stage) for stage in range(4)]
SEQUENCES += [("apollo", 2), ("apollo", 3), ("apollomini", 3)]
for rule, stage in SEQUENCES:
    more = {"gradient_clipping": 0.0 if rule == "lomo" else 0.05}
    CASES[f"sequences-{rule}-{stage}"] = Case("sequences", rule, stage, more)
    if (rule, stage) in (("adalomo", 1), ("adalomo", 3), ("muon", 1)):
        name = f"sequences-{rule}-{stage}-saved"
        CASES[name] = Case("sequences", rule, stage, more, saved=True)


class Fused(nn.Module):
    """A block whose queries, keys and values are one matrix, and whose gates and inputs are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.qkv = nn.Linear(24, 3 * 24, bias=False)
        self.out = nn.Linear(24, 24)
        self.gate_up = nn.Linear(24, 2 * 40)
        self.down = nn.Linear(40, 24)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        h = self.embed(input_ids)
        # whatever a rank holds of each of the three
        q, k, v = (x.unflatten(-1, (-1, 4)).transpose(1, 2) for x in self.qkv(h).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(seen.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(h).chunk(2, -1)
        h = h + self.down(F.silu(gate) * up)
        return SimpleNamespace(logits=self.head(h))


def make(kind: str, dropout: float = 0.0) -> torch.nn.Module:
    """A small model that two ranks divide unevenly: it has three key-value heads, 37 tokens."""
    if kind == "sequences":
        return test_ulysses.make()
    torch.manual_seed(5)
    sizes = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 1}
    if kind == "bert":
        sizes |= {"intermediate_size": 42, "num_attention_heads": 3, "max_position_embeddings": 16}
        drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
        return BertForMaskedLM(BertConfig(**sizes, **drops))
    heads = {"intermediate_size": 40, "num_attention_heads": 6, "num_key_value_heads": 3}
    if kind == "fused":
        return Fused()
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=kind == "tied"))


def loss_of(model, kind: str, step: int, rank: int) -> torch.Tensor:
    """A loss with gradients of full rank, of the tokens of one rank of data parallelism."""
    if kind == "sequences":
        return test_ulysses.loss_of(model, step, rank, slice(None))
    generator = torch.Generator().manual_seed(97 * step + rank)
    tokens = torch.randint(0, VOCAB, (4, 9), generator=generator)
    target = torch.randn(4, 9, VOCAB, generator=generator)
    if kind == "tied":  # its logits are divided too
        return model(input_ids=tokens, labels=tokens).loss
    return (model(input_ids=tokens).logits - target).square().mean()


def reference(case: Case, told: by_role.Told) -> engines.Alone:
    key = repr(replace(case, stage=0, saved=False))
    if key not in known:
        known[key] = alone(case, told)
    return known[key]


known: dict[str, engines.Alone] = {}


def alone(case: Case, told: by_role.Told) -> engines.Alone:
    model = make(case.model)
    named = dict(model.named_parameters())
    if case.rule in by_role.MATRICES:
        optimizer = by_role.as_told(case.rule, case.hypers, told, named)
    else:
        groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
        names = {p: n for n, p in named.items()}
        optimizer_of = by_role.optimizer(names, r"_proj|(qkv|out|up|down)\.weight", {})
        optimizer = optimizer_of(case.rule, groups, case.hypers)

    def loss(model: nn.Module, *of: int) -> torch.Tensor:
        return loss_of(model, case.model, *of)

    pairs = dist.get_world_size() // 2
    return engines.alone(model, optimizer, loss, STEPS, pairs, case.max_norm, case.gas)


def start(case: Case):
    params = case.hypers | OURS.get(case.rule, {}) | {"weight_decay": 0.0}
    more: dict[str, Any] = {"optimizer": {"type": f"ds_ext.{case.rule}", "params": params}}
    more["zero"] = {"reduce_bucket_size": 1500}
    if case.model == "sequences":
        return test_ulysses.initialized(engines.config(case.stage, **more | case.more))
    more |= {"gradient_accumulation_steps": case.gas, "tensor_parallel": {"autotp_size": 2}}
    more |= FUSED if case.model == "fused" else {}
    more["zero"] = {"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 20}
    return engines.start(make(case.model, case.dropout), None, case.stage, **more | case.more)


def loss_here(kind: str) -> engines.Loss:
    """The loss of a rank, which is one of a pair."""

    def loss(model: Any, number: int, rank: int) -> torch.Tensor:
        if kind == "sequences":
            return test_ulysses.loss_here(model, number)
        return loss_of(model, kind, number, rank // 2)

    return loss


def train(engine, case: Case, steps) -> list[float]:
    torch.manual_seed(dist.get_rank())  # dropout differs on all ranks
    return engines.train(engine, loss_here(case.model), steps, case.gas)


def rebuilt(param: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """A parameter put together from what two ranks hold of it, by DeepSpeed's map; else its own."""
    meta = getattr(param, DS_AUTOTP_UC_META, None)
    if meta is None or meta["conversion"]["replicated"]:
        return own
    held = [None, None]
    dist.all_gather_object(held, own, group=groups.get_tensor_model_parallel_group())
    made = ParamAffineMap.from_dict(meta["conversion"]["affine_map"])
    return made.rebuild(dict(enumerate(held)))


def weights(engine) -> tuple[dict, bool]:
    """Whole weights, and whether all ranks have the same bits of them."""
    own = whole(engine.module)
    found = {n: rebuilt(p, own[n]) for n, p in engine.module.named_parameters()}
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    return found, all(torch.equal(rank[n], p) for rank in ranks for n, p in found.items())


_pair = groups.get_tensor_model_parallel_group


def error(name: str) -> dict[str, Any]:
    """‖difference‖ / ‖update‖ over the model, without the key biases, whose gradient is 0."""
    case = CASES[name]
    engine, half = start(case), STEPS // 2
    norms = train(engine, case, range(half))
    if case.saved:
        with shared_folder() as folder:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = start(case)
            engine.load_checkpoint(folder)
    norms += train(engine, case, range(half, STEPS))
    layout = engine.optimizer.layout
    held = {
        layout.names[p]: h.split.boxes
        for d in layout.placements
        for p, h in d.tensor_parallel_shards.items()
    }
    after, alike = weights(engine)
    told = by_role.told(engine.optimizer, engine.module)
    shares_sequences = case.model == "sequences"
    pair = groups._get_sequence_parallel_group if shares_sequences else _pair
    waiting = [dist.group.WORLD, pair()]
    limits = {g._get_backend(torch.device("cpu")).options._timeout for g in waiting}
    engine.destroy()
    assert dist.get_world_size(pair()) == 2
    result = {"alike": alike, "norms": norms, "held": held, "time limits": limits}
    if not case.dropout and dist.get_rank() == 0:
        before, expected, result["expected norms"] = reference(case, told)
        counted = {n: p for n, p in expected.items() if not n.endswith("attention.self.key.bias")}
        result["error"] = updates.error(after, counted, before)
        result["worst"] = max((updates.error(after, {n: p}, before), n) for n, p in counted.items())
    return result


# FlashAdamW steps the output head beside SinkGD, and its codes of 8 bits jump.
CLOSE = hypers.CLOSE | {"sinkgd": 1e-4}
# What `make test` runs: each way of dividing, at one stage or another.
QUICK = [
    *("llama-came-1", "llama-muon-3", "bert-adafactor-1", "fused-0", "tied-1"),
    "sequences-lomo-1",
]
# Without data parallelism: each stage, with clipping, and with accumulation.
ALONE = ["llama-came-0", "clip-1", "llama-came-2", "accumulate-3", "clip-muon-3"]


def _feature(name):
    if name.startswith("sequences"):
        return "sequence parallelism (Ulysses)"
    more = name.startswith(("clip", "accumulate", "resume"))
    return "tensor parallelism" + (": clipping, accumulation, resume" if more else " (AutoTP)")


# A rule does not know how its matrices are divided: each by each model, wherever; then the ways.
RULES = pairs(CASES, lambda name: (_feature(name), CASES[name].model, CASES[name].rule), QUICK)
CHOSEN = pairs(CASES, lambda name: (_feature(name), *CASES[name].settings), RULES)


@pytest.mark.supports(_feature, **of(CASES))
@pytest.mark.parametrize("name", params(CHOSEN, QUICK))
def test_four_ranks_equal_one_process(name):
    compare(name, 4)


@pytest.mark.parametrize("name", params(ALONE, ["llama-came-2", "clip-1"]))
def test_two_ranks_without_data_parallelism_equal_one_process(name):
    compare(name, 2)


def compare(name, ranks):
    case, result = CASES[name], worlds.once(ranks, error, name)[0]
    assert result["alike"]  # replicated parameters on all ranks, others where the same is held
    assert len(result["time limits"]) == 1  # the forward pass waits for lost ranks no longer
    if not case.dropout:
        close = CLOSE.get(case.rule, 1e-5)
        assert result["error"] <= close, result
        is_exact = case.model != "sequences"
        norms = result["expected norms"]
        assert result["norms"] == pytest.approx(norms, rel=close if is_exact else 1e-4)
        assert is_exact or min(norms) > 1.2 * case.max_norm  # or clipping would show nothing


def test_the_cases_divide_unevenly_and_in_every_way():
    """Rows, columns, a fused matrix, biases of both kinds, a vocabulary."""
    boxes = {}
    for name in ("llama-came-1", "bert-adafactor-1", "fused-0", "tied-1"):
        boxes |= worlds.once(4, error, name)[0]["held"]
    sizes = {n: [sum(b.numel for b in part) for part in parts] for n, parts in boxes.items()}
    assert any(a != b for a, b in sizes.values())
    assert any(len(part) > 1 for parts in boxes.values() for part in parts)
    names = "".join(sizes)
    for part in ("o_proj", "q_proj", "lm_head", "embed_tokens", "query.bias", "gate_up.bias"):
        assert part in names


class Described:
    def __init__(self, meta):
        setattr(self, constants.DS_AUTOTP_UC_META, meta)
        self.tensor_model_parallel = True


UNSUPPORTED = {"conversion": {"replicated": False, "unsupported_reason": "it is a convolution"}}
UNSUPPORTED |= {"logical_shape": (4, 4), "partition_sizes": None, "partition_dim": 0}
WHY = [(None, "its layer has no description of the split"), (UNSUPPORTED, "it is a convolution")]


@pytest.mark.parametrize("meta, why", WHY)
def test_what_is_not_known_to_be_divided_how_is_refused(meta, why):
    with pytest.raises(ValueError, match=f"autotp_size: .* conv.weight .*{why}"):
        autotp.tensor_parallel_shards({Described(meta): "conv.weight"}, 0, 2, None)


@pytest.mark.parametrize("how", ["columns of parts", "shared", "scaled"])
def test_pieces_that_are_no_boxes_are_refused(how):
    from deepspeed.checkpoint import affine

    made = {
        "columns of parts": lambda: affine.sub_param_map((4, 8), [4, 4], [[2, 2], [2, 2]], 1),
        "shared": lambda: affine.segmented_map((6, 4), [(4, False), (2, True)], 0, 2, [[2, 2]]),
        "scaled": lambda: affine.replicated_map((4,), 2, scale=0.5),
    }[how]()
    meta = {"conversion": {"replicated": False, "affine_map": made.to_dict()}}
    with pytest.raises(ValueError, match="partition_config"):
        autotp.tensor_parallel_shards({Described(meta): "w"}, 0, 2, None)
