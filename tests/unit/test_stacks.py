"""Stacked experts in one process: each is stepped as a parameter of its own, on all ranks alike.

(Real ranks and Hugging Face's models: test_experts.py.)
"""

import copy
import functools
import itertools

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext import rules
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import zeros
from ds_ext.optimizer import OPTIMIZERS, expert_stacks, param_groups
from ds_ext.optimizer.model_view import model_view
from tests.common import optimizer_ranks, plain, table
from tests.common.by_role import MATRICES
from tests.common.choose import params
from tests.common.hypers import FOR_ALL, SIMULATED, changed
from tests.common.optimizer_ranks import of_rule, step, whole
from tests.common.simulated import EXACT, errors
from tests.distributed.experts_jobs import KINDS, SIZES

SHAPES = ((5, 6, 9), (3, 7, 4), (4, 11), (1, 5, 3), (3, 2, 3, 4))
STEPS = 6
_ALL = changed(
    SIMULATED, adalomo={"clip_threshold": 0.5}, galoreadamw={"rank": 2, "update_proj_gap": 3}
)
HYPERS = {name: _ALL[name] for name in FOR_ALL}
EIGHT = {"nbits": 8, "min_8bit_size": 10}


def gradients(idle=()):
    """Of all steps; of experts that differ in scale by far. ``idle``: those whose are 0."""
    made = table.gradients(STEPS, SHAPES)
    for grads in made:
        for g in grads:
            g *= (10.0 ** torch.arange(len(g), dtype=g.dtype)).view(-1, *[1] * (g.dim() - 1))
            for i in idle:
                g[i : i + 1] = 0
    return made


def apart(name, values, steps, hypers):
    """The stacks, each expert of which was stepped as a parameter of its own."""
    make = functools.partial(OPTIMIZERS[name], **hypers)
    return list(map(torch.stack, plain.in_parts(make, torch.unbind, values, steps)))


def worst(got, expected, before):
    """The worst expert's error, relative to its update."""
    return max(max(errors(*stacks)) for stacks in zip(got, expected, before, strict=True))


# Numbers of ranks, and experts that no token comes to.
BY_RANKS = itertools.product(HYPERS, [(1, ()), (2, ()), (3, (0, 2)), (7, (0, 2))])
BY_RANKS = [(name, *ranks) for name, ranks in BY_RANKS] + [("adafactor", 20, ())]
RESUMED = ["adafactor", "flashadamw", "lomo", "muon"]
QUICK = [(name, 3, (0, 2)) for name in HYPERS] + [("adafactor", 2, ())]


@pytest.mark.parametrize("name, world, idle", params(BY_RANKS, QUICK))
def test_an_expert_is_stepped_as_a_parameter_of_its_own(name, world, idle):
    before, steps = table.weights(SHAPES), gradients(idle)
    ranks = of_rule(name, before, world, HYPERS[name], 0)
    step(ranks, *steps)
    expected = apart(name, before, steps, HYPERS[name])
    assert worst(whole(ranks), expected, before) <= 1e-9


def test_8_bit_moments_are_rounded_in_an_experts_own_blocks():
    pytest.importorskip("bitsandbytes")
    shapes = ((3, 9, 100),)
    hypers = {"lr": 0.02, "rank": None} | EIGHT
    before, steps = table.weights(shapes, torch.float32), table.gradients(4, shapes, torch.float32)
    expected = apart("galoreadamw", before, steps, hypers)
    for world in (1, 2, 7):
        ranks = of_rule("galoreadamw", before, world, hypers, 0)
        step(ranks, *steps)
        assert worst(whole(ranks), expected, before) <= 1e-6


@pytest.mark.parametrize("weight_update", ["stochastic", "master", "master24"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_experts_have_the_same_bits_on_any_number_of_ranks(dtype, weight_update):
    # Gradients are small whole numbers, whose sums are exact.
    before = [w.to(dtype) for w in table.weights(SHAPES)]
    steps = [[(g % 5).round().to(dtype) for g in grads] for grads in gradients()]
    hypers = {"lr": 1e-3, "weight_update": weight_update}
    seen = []
    for world in (1, 2, 7):
        ranks = of_rule("lomo", before, world, hypers, 0)
        step(ranks, *steps)
        seen.append(whole(ranks))
    # As the noise of the whole parameter is: the step of one tensor, LOMO's being by element.
    together = optimizer_ranks.made(lambda params: ds_ext.LOMO(params, **hypers), before, 1)
    step(together, *steps)
    for other in (*seen[1:], whole(together)):
        assert all(map(torch.equal, seen[0], other))


def test_experts_that_other_ranks_do_not_have_keep_their_noise():
    """AutoEP's: the second half of a stack alone, as the experts 2 and 3 that they are."""
    shape = ((4, 6, 9),)
    before = [w.bfloat16() for w in table.weights(shape)]
    grads = [g.round().bfloat16() for g in table.gradients(1, shape)[0]]
    hypers = {"lr": 1e-3, "weight_update": "stochastic"}
    part, part_of_grads = [before[0][2:]], [grads[0][2:]]
    every, half = of_rule("lomo", before, 1, hypers, 0), of_rule("lomo", part, 1, hypers, 2)
    astray = of_rule("lomo", part, 1, hypers, 0)
    for ranks, own in ((every, grads), (half, part_of_grads), (astray, part_of_grads)):
        step(ranks, own)
    expected = whole(every)[0][2:]
    assert torch.equal(whole(half)[0], expected)
    assert not torch.equal(whole(astray)[0], expected)
    (state,) = half[0].optimizer.state.values()
    assert list(state["experts"]) == ["2", "3"]


@pytest.mark.parametrize("name", params([*HYPERS, "muon"], RESUMED))
def test_a_checkpoint_of_experts_is_gone_on_from_by_other_ranks(name):
    shapes, hypers = (SHAPES, HYPERS[name]) if name in HYPERS else (SHAPES[:2], {"beta2": 0.9})
    before, steps = table.weights(shapes), [grads[: len(shapes)] for grads in gradients()]
    straight = of_rule(name, before, 2, hypers, 0)
    step(straight, *steps)
    first = of_rule(name, before, 2, hypers, 0)
    step(first, *steps[:3])
    again = of_rule(name, list(map(torch.zeros_like, before)), 3, hypers, 0)
    optimizer_ranks.load(again, first)
    step(again, *steps[3:])
    assert worst(whole(again), whole(straight), before) <= 1e-9


@pytest.mark.parametrize("name", MATRICES)
def test_a_rule_for_matrices_steps_each_expert_by_its_own(name):
    """With the random numbers of that expert, if the rule draws any."""
    before, steps = table.weights([(4, 13, 6)]), table.gradients(5, [(4, 13, 6)])
    stack = nn.Parameter(before[0].clone())
    optimizer = OPTIMIZERS[name]([stack], **SIMULATED[name])
    optimizer.stacks = {stack: 0}
    params = [nn.Parameter(expert.clone()) for expert in before[0]]
    alone = OPTIMIZERS[name](params, **SIMULATED[name])
    streams = set()
    for (grads,) in steps:
        stack.grad = grads.clone()
        optimizer.step()
        experts = optimizer.state[stack][expert_stacks.EXPERTS].values()
        for p, g, expert in zip(params, grads, experts, strict=True):
            p.grad = g.clone()
            if not alone.state[p]:
                parts = alone.state_spec(p, Shard.whole(p.shape), alone.rule_of(p))
                stream = int(expert.get("stream", 0))
                alone.state[p].update(zeros(parts, p.detach(), stream), step=0)
                streams.add(stream)
        alone.step()
    assert len(streams) == (len(params) if "stream" in next(iter(experts)) else 1)
    assert worst([stack], [torch.stack(params)], before) <= EXACT


class Experts(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 5, 3))
        self.up_bias = nn.Parameter(torch.randn(count, 5))
        self.table = nn.Parameter(torch.randn(count, 3))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts(4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.mix = nn.ParameterList([nn.Parameter(torch.randn(2, 3, 3))])
        self.single = nn.ModuleList([nn.Conv2d(1, 2, 3)])  # experts may be of any kind
        self.single[0].num_experts = 2


def test_what_stacks_experts():
    layer = Layer()
    names = {p: n for n, p in layer.named_parameters()}
    assert {names[p] for p in expert_stacks.find(layer)} == {"experts.up", "experts.up_bias"}
    layer.experts.num_experts = 5  # says that it counts something else
    assert expert_stacks.find(layer) == set()


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss", "qwen3"])
def test_hugging_faces_experts_are_found(kind):
    model_type, config_type, sizes = KINDS[kind]
    with torch.device("meta"):
        model = model_type(config_type(**SIZES | sizes))
    found = expert_stacks.find(model)
    expected = {n for n, _ in model.named_parameters() if ".experts." in n}
    assert {n for n, p in model.named_parameters() if p in found} == expected
    assert len(expected) == (8 if kind == "gpt-oss" else 4)
    # GaLore projects them as it does linear layers, and their biases are not decayed.
    matrices = {n for n in expected if "bias" not in n}
    entry, view = rules.REGISTRY["galoreadamw"], model_view(model)
    groups = param_groups.of_config(entry, {}, view, list(model.parameters())).groups
    projected = {p for g in groups if "rank" not in g for p in g["params"]}
    assert matrices <= {n for n, p in model.named_parameters() if p in projected}
    assert not projected & {p for n, p in model.named_parameters() if "bias" in n or "gate.w" in n}
    decayed = param_groups.decay_groups(view, list(model.parameters()), 0.1)[0]["params"]
    assert {n for n, p in model.named_parameters() if p in set(decayed)} & expected == matrices


def test_a_plain_step_separates_experts_when_it_is_told_to():
    torch.manual_seed(0)
    one, other = Layer(), Layer()
    other.load_state_dict(one.state_dict())
    optimizer = ds_ext.AdaLomo(one.parameters(), lr=0.02).separate_experts(one)
    together = ds_ext.AdaLomo(other.parameters(), lr=0.02)
    steps = [{n: torch.randn_like(p) for n, p in one.named_parameters()} for _ in range(3)]
    before = one.experts.up.detach().clone()
    for grads in steps:
        for model, own in ((one, optimizer), (other, together)):
            for n, p in model.named_parameters():
                p.grad = grads[n].clone()
            own.step()
    gradients = [[g["experts.up"]] for g in steps]
    expected = apart("adalomo", [before], gradients, {"lr": 0.02})
    assert worst([one.experts.up.detach()], expected, [before]) <= 1e-6
    assert worst([other.experts.up.detach()], expected, [before]) > 1e-2
    again = ds_ext.AdaLomo(other.parameters(), lr=0.02).separate_experts(other)
    again.load_state_dict(optimizer.state_dict())
    state = again.state[other.experts.up]["experts"]["3"]["v"]["row"]
    assert torch.equal(state, optimizer.state[one.experts.up]["experts"]["3"]["v"]["row"])
    with pytest.raises(ValueError, match="lacks one entry per expert"):
        again.load_state_dict(together.state_dict())
    with pytest.raises(ValueError, match="lacks one entry per expert"):
        together.separate_experts(other)
    with pytest.raises(ValueError, match="has one entry per expert"):
        together.load_state_dict(optimizer.state_dict())
    twin = copy.deepcopy((one, optimizer))
    assert twin[1].stacks.keys() == expert_stacks.find(twin[0])
