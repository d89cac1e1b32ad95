"""Every stage of ZeRO on real ranks against the authors' optimizers in one process; the nine BERT
classes by all optimizers."""

import functools
import re
from collections import Counter
from itertools import cycle

import pytest
import torch
import transformers
from transformers import BertConfig

import ds_ext
from ds_ext.rules import REGISTRY
from tests import worlds
from tests.common import by_role, engines, models, updates
from tests.common.authors import INDEPENDENT
from tests.common.by_role import MATRICES
from tests.common.choose import pairs, params
from tests.common.hypers import CLOSE, NEEDED, changed
from tests.common.ranks import whole
from tests.common.states import same
from tests.common.updates import check
from tests.distributed import training_jobs, zero_jobs
from tests.distributed.zero_jobs import CASES, RULES, STEPS, is_used
from tests.tools.support import of

# Three ranks on two cores are slow: what is run there is one case of each kind, and what awkward
# cuts may break. (Numbers of ranks up to 1,024 are simulated in test_every_rule.py.)
ON_THREE = re.compile(
    r"^(lomo|adalomo|adafactor|came)(-stage1|-reentrant|-plain)?$|^(lamb|galoreadamw)(-stage1)?$"
    r"|^adalomo-(bf16-stage3|partitioned)$|^(apollo|apollomini|muon)-(stage[0-3]|plain)$"
)
# One rank, of which stages 0 to 2 differ in nothing, has some of them.
ON_ONE = re.compile(r"^(adalomo|came)-|^[a-z]+(-plain|-stage0)?$")
TABLE = [(2, name) for name in CASES]
TABLE += [(1, name) for name in CASES if ON_ONE.search(name)]
TABLE += [(3, name) for name in CASES if ON_THREE.search(name)]
FACTORED = ("adalomo", "adafactor", "came")  # rounds of matrices begin with sums of g²
WITHOUT_SUMS = ("lomo", "adamw", "lamb", "lion")  # states or weights change before, if any travel

# What `make test` runs: each rule at a stage, which go round, and some habits.
AT = ("-stage1", "-plain", "-stage2", "-stage0")
QUICK = {(2, rule + at) for rule, at in zip(RULES, cycle(AT))}  # noqa: B905
QUICK |= {
    *((2, name) for name in ("adalomo", "came-decay-json", "adafactor-reentrant")),
    *((2, name) for name in ("apollo-plain", "muon-zero-init", "muon-stage1-reentrant")),
    *((1, "came"), (2, "adalomo-bf16-stage1"), (3, "apollomini-stage1")),
}
# Each rule at each stage, and pairs of all else.
ALL = pairs(
    TABLE,
    lambda case: (case[0], *CASES[case[1]].settings),
    QUICK
    | {(2, rule + at) for rule in REGISTRY for at in ("", *AT, "-stage3") if rule + at in CASES},
)
EXACT = [c for c in ALL if not CASES[c[1]].extra]


def test_each_rule_and_each_stage_is_quick():
    assert {CASES[name].rule for _, name in QUICK} == {*REGISTRY}
    assert {CASES[name].stage for _, name in QUICK} == {None, 0, 1, 2, 3}


def shown(name: str) -> list[str]:
    case = CASES[name]
    usual = case.checkpointing is None and not case.zero_init
    has_authors = case.rule in INDEPENDENT or case.rule in MATRICES
    said = {
        "fp32, each optimizer against its authors' code": usual and has_authors,
        "tied, shared, unused weights; 0 to 4 dimensions": usual,
        "models built under `zero.Init`": case.zero_init,
        "weight decay set in the JSON config": case.is_json,
        "reentrant activation checkpointing": case.checkpointing == "reentrant",
        "non-reentrant activation checkpointing": case.checkpointing == "nonreentrant",
    }
    return [feature for feature, holds in said.items() if holds]


@pytest.mark.supports(shown, **of(CASES))
@pytest.mark.parametrize("ranks, name", params(EXACT, QUICK.__contains__))
def test_equals_the_authors(ranks, name):
    got, case = worlds.once(ranks, zero_jobs.train, name)[0], CASES[name]
    if case.rule in MATRICES:
        check_roles(got, case)
    before, after, norms = training_jobs.alone(case, ranks, got)
    assert same(got["before"], before)
    check(got["after"], after, before, STEPS, CLOSE.get(case.rule, 1e-5))
    assert got["norms"] == pytest.approx(norms, rel=1e-4)
    untouched = {"unused.weight", "unused.bias", "frozen.weight", "frozen.bias"}
    moved = {n for n in after if not torch.equal(got["after"][n], before[n])}
    assert moved == set(after) - untouched


def check_roles(got, case):
    """Matrices of linear layers are stepped by the rule, and all else by AdamW."""
    stepped = {"up.weight", "down.weight", "shared.weight", "odd.weight"}
    linear = stepped | {"unused.weight"}
    if case.stage is not None:  # engines have groups of frozen parameters, which may be unfrozen
        linear.add("frozen.weight")
    assert {n for n, (kind, *_) in got["groups"].items() if kind is None} == linear
    assert {kind for kind, *_ in got["groups"].values()} == {None, "AdamW"}
    if "apollo" in case.rule:
        assert got["streams"].keys() == stepped and len(set(got["streams"].values())) == 4


@pytest.mark.parametrize("ranks, name", params(ALL, QUICK))
def test_gradients_come_go_and_step_once(ranks, name):
    got, case = worlds.once(ranks, zero_jobs.train, name)[0], CASES[name]
    assert got["identical"]  # all ranks hold the same bits
    for param, steps in got["steps"].items():
        assert steps == (STEPS // 2 if param == "odd.weight" else STEPS), param
    assert len(got["steps"]) == sum(map(is_used, got["before"]))
    assert got["kept"] == 0
    assert 0 < got["alive"] <= zero_jobs.most_alive(case, ranks)
    if case.checkpointing is None and case.rule not in MATRICES:
        check_traffic(got["sent"], case, ranks)


def votes(case, used: list[torch.Tensor]) -> tuple[int, int]:
    """The fewest and the most gradients that ranks vote on: sums tell of the others."""
    if case.rule in FACTORED:
        vectors = sum(p.ndim < 2 for p in used)
        return vectors, vectors
    if case.rule in WITHOUT_SUMS:
        return len(used), len(used)
    return 0, len(used)


def check_traffic(sent: list[tuple[str, int]], case, ranks: int) -> None:
    """Gradients are reduce-scattered once, and only statistics all-reduced."""
    if ranks == 1:
        assert {kind for kind, _ in sent} == {"bucket"}
        return
    model = models.make()
    used = [p for n, p in model.named_parameters() if is_used(n)]
    totals = {kind: sum(n for k, n in sent if k == kind) for kind, _ in sent}
    calls = Counter(kind for kind, _ in sent)
    totals.pop("bucket")
    low, high = votes(case, used)
    if not case.stage:
        gradients = sum(p.numel() for p in used)
        assert totals.keys() == {"all_reduce"}
        assert low <= totals["all_reduce"] - gradients <= high
        assert calls["all_reduce"] == calls["bucket"]
        return
    assert calls["reduce_scatter"] == calls["bucket"]
    rounds = REGISTRY[case.rule].rounds
    if "more" not in rounds:  # as when a basis is renewed
        most = max(map(int, re.findall(r"\b\d+\b(?!-)", rounds)))
        assert calls["all_reduce"] <= most * calls["bucket"] + 1  # and the norm
    gradients = sum(-(-p.numel() // ranks) * ranks for p in used)
    assert ranks * low <= totals["reduce_scatter"] - gradients <= ranks * high
    if case.rule in INDEPENDENT:  # the sums of these are of rows, columns and whole parameters
        statistics = sum(sum(p.shape) + 2 for p in used)
        most = 5 if case.rule == "sinkgd" else 4  # one for each of its iterations
        assert totals.get("all_reduce", 0) <= most * statistics


BF16 = [(n, stage) for n in (1, 2) for stage in range(4)] + [(3, 3)]


@pytest.mark.supports("bf16 weights", stage="stage", optimizer="AdaLomo")
@pytest.mark.parametrize("ranks, stage", params(BF16, [(2, 1)]))
def test_bf16_follows_fp32(ranks, stage):
    got = worlds.once(ranks, zero_jobs.train, f"adalomo-bf16-stage{stage}")[0]
    exact = worlds.once(ranks, zero_jobs.train, "adalomo")[0]
    for n, p in got["after"].items():
        assert p.dtype == torch.bfloat16
        update = (exact["after"][n] - exact["before"][n]).norm()
        resolution = 2**-8 * exact["after"][n].norm()  # half a spacing of bf16 at most
        assert (p.float() - exact["after"][n]).norm() <= 0.3 * update + resolution, n
    # Over the whole model, in which the noise of small parameters does not count.
    assert updates.error(got["after"], exact["after"], exact["before"]) <= 0.25


def outside() -> None:
    model = torch.nn.Linear(6, 5)
    optimizer = ds_ext.AdaLomo([model.weight])
    engine = engines.start(model, optimizer, 3)
    before = whole(model)
    engine.backward(engine(torch.randn(2, 6)).square().sum())
    assert sum(p.grad is not None for p in model.parameters()) == 1
    engine.step()
    after = whole(model)
    assert {n for n in after if not torch.equal(after[n], before[n])} == {"weight"}


@pytest.mark.parametrize("ranks", params((1, 2, 3), (2,)))
def test_a_trainable_parameter_outside_the_optimizer_keeps_its_gradient(ranks):
    worlds.run(ranks, outside)


CLASSES = ("BertModel", "BertForPreTraining", "BertLMHeadModel", "BertForMaskedLM")
CLASSES += ("BertForSequenceClassification", "BertForTokenClassification")
CLASSES += ("BertForNextSentencePrediction", "BertForMultipleChoice", "BertForQuestionAnswering")
STAGES = range(4)
BERT_STEPS = 3
HYPERS = changed(NEEDED, galoreadamw={"rank": 4, "update_proj_gap": 2, "nbits": 32})


def make(name: str) -> torch.nn.Module:
    """A small BERT: its vocabulary divides by nothing, its decoder is tied to its embedding."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 26, "max_position_embeddings": 9}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**sizes, **dropout, is_decoder=name == "BertLMHeadModel")
    return getattr(transformers, name)(config)


def loss_of(model, number: int, rank: int, name: str) -> torch.Tensor:
    """A loss with full-rank gradients, of this rank's own tokens."""
    generator = torch.Generator().manual_seed(97 * number + rank)
    shape = (2, 3, 7) if name == "BertForMultipleChoice" else (2, 7)
    tokens = torch.randint(0, 67, shape, generator=generator)
    outputs = model(input_ids=tokens, use_cache=False).to_tuple()
    targets = [torch.randn(o.shape, generator=generator) for o in outputs]
    return sum((o - t).square().mean() for o, t in zip(outputs, targets, strict=True))


@functools.cache
def alone(name: str, rule: str) -> engines.Alone:
    model = make(name)
    loss = functools.partial(loss_of, name=name)
    return engines.alone(model, by_role.made(rule, model, HYPERS[rule]), loss, BERT_STEPS)


def sharded(name: str, rule: str, stage: int) -> dict[str, torch.Tensor]:
    model = make(name)
    optimizer = by_role.made(rule, model, HYPERS[rule])
    engine = engines.start(model, optimizer, stage, zero={"reduce_bucket_size": 700})
    after = engines.trained(engine, functools.partial(loss_of, name=name), BERT_STEPS)["after"]
    engine.destroy()
    return after


def error(name: str, rule: str, after: dict[str, torch.Tensor]) -> float:
    """‖difference‖ / ‖update‖ over the model, without the key biases, whose gradient is 0: what
    they move by is rounding."""
    before, expected, _ = alone(name, rule)
    counted = {n: p for n, p in expected.items() if not n.endswith("attention.self.key.bias")}
    return updates.error(after, counted, before)


# Every rule at every stage, with the classes in turn.
PAIRS = [(rule, stage) for rule in REGISTRY for stage in STAGES]
BERTS = [(name, *pair) for name, pair in zip(cycle(CLASSES), PAIRS)]  # noqa: B905
QUICK_BERTS = [BERTS[i] for i in (0, 5, 15)]


@pytest.mark.supports("the nine BERT model classes", stage="stage", optimizer="rule")
@pytest.mark.parametrize("name, rule, stage", params(BERTS, QUICK_BERTS))
def test_bert_equals_one_process(name, rule, stage):
    after = worlds.once(2, sharded, name, rule, stage)[0]
    assert error(name, rule, after) <= CLOSE.get(rule, 1e-5)
