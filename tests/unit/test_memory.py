"""The planner's arithmetic against the tensors that are really alive, and known closed forms."""

import contextlib
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_ext
from benchmarks import memory as benchmark
from ds_ext.backward import gradient_config
from ds_ext.backward.buckets import Buckets
from ds_ext.backward.fused_backward import FusedBackward
from ds_ext.distributed.layout import Agreement, Layout
from ds_ext.distributed.placement import Sharded
from ds_ext.ops import int8
from ds_ext.optimizer import OPTIMIZERS, expert_stacks
from ds_ext.planner import memory
from ds_ext.planner import models as known
from ds_ext.planner.live_memory import LiveMemory
from ds_ext.planner.memory import shapes_of
from tests.common import int8_model, models, optimizer_ranks
from tests.common.choose import pairs, params
from tests.common.hypers import FOR_ALL
from tests.common.simulated import fake_rank
from tests.common.states import tensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SETTINGS = [(name, {}) for name in FOR_ALL]
SETTINGS += [("adafactor", {"beta1": 0.9}), ("galoreadamw", {"rank": 16, "nbits": 8})]
SETTINGS += [("adafactor", {"beta1": 0.9, "nbits": 8}), ("came", {"nbits": 8})]
SETTINGS += [(name, {"weight_update": "master"}) for name in ("lomo", "adalomo", "came")]
SETTINGS += [("lomo", {"weight_update": "master24"}), ("lomo", {"ema_decay": 0.9})]
SETTINGS += [("lomo", {"ema_decay": 0.9, "ema_dtype": "bf16"})]
BUCKET = 5000


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=301, **sizes, **heads))


class Stacked(nn.Module):
    """Four experts, whose weights and biases are stacks."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Module()
        self.experts.num_experts = 4
        self.experts.up = nn.Parameter(torch.randn(4, 50, 30))
        self.experts.up_bias = nn.Parameter(torch.randn(4, 50))
        self.table = nn.Parameter(torch.randn(4, 300))


MODELS = {"llama": llama, "zoo": lambda: models.make().requires_grad_(True), "experts": Stacked}


def held(values):
    """Bytes of the memory that tensors lie in, each storage once."""
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in values)}
    return sum(storages.values())


def close(planned, measured):
    return abs(planned - measured) <= 0.02 * measured


PLAIN = pairs(itertools.product(SETTINGS, MODELS, DTYPES))


@pytest.mark.parametrize("setting, model, dtype", PLAIN, ids=str)
def test_a_plain_step_holds_what_is_planned(setting, model, dtype):
    name, hypers = setting
    module = MODELS[model]().to(DTYPES[dtype])
    params = list(module.parameters())
    optimizer = OPTIMIZERS[name](params, **hypers).separate_experts(module)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    rule = optimizer.hypers(**hypers)
    planned = memory.optimizer_memory(rule, shapes_of(module), None, 1, DTYPES[dtype], BUCKET)
    assert planned.weights == held(params)
    assert planned.gradients == held(p.grad for p in params)
    states = optimizer.state.values()
    kept = [s["master"] for s in states if "master" in s]
    assert planned.master == held(kept)
    state = held(t for s in states for t in tensors(s))
    assert close(planned.state + planned.master, state), (planned, state)


@pytest.mark.parametrize("name", ["adalomo", "flashadamw"])
def test_weights_in_8_bits_hold_what_is_planned(name):
    model = int8_model.made().requires_grad_(True)
    ds_ext.store_int8(model)
    optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-3)
    ds_ext.fuse_into_backward(model, optimizer)
    model(int8_model.batch(0)).backward()
    optimizer.step()
    rule, shapes = optimizer.hypers(), shapes_of(model)
    planned = memory.optimizer_memory(rule, shapes, 0, 1, torch.bfloat16, BUCKET, in_int8=True)
    codes = [each.stored for p in model.parameters() if (each := int8.find(p))]
    others = [p for p in model.parameters() if not int8.find(p)]
    weights = held(codes + others)
    state = held(t for s in optimizer.state.values() for t in tensors(s))
    assert planned.weights == weights
    assert close(planned.weights + planned.state, weights + state), planned
    assert len(codes) == len(int8_model.STORED) + 1 and all(int8.find(p) is None for p in others)


def test_an_8b_model_in_8_bits_fits_16_gb():
    shapes = memory.shapes_of(known.skeleton(known.config("llama-3.1-8b")))
    rule = OPTIMIZERS["adalomo"].hypers()
    plan = memory.optimizer_memory(rule, shapes, 0, 1, torch.bfloat16, 2**24, in_int8=True)
    assert plan.weights + plan.state == pytest.approx(8.03e9 * (1 + 1 / 32), rel=0.01)
    most = 128_256 * 4096  # the output head: its gradient, and its values in bf16
    assert 2 * 2 * most < plan.gradients < 4 * 2 * most


ON_RANKS = pairs(itertools.product(SETTINGS, MODELS, DTYPES, [1, 2, 3, 8]))


@pytest.mark.parametrize(
    "setting, model, dtype, ranks", params(ON_RANKS, lambda case: case[-1] == 2), ids=str
)
def test_simulated_ranks_hold_what_is_planned(setting, model, dtype, ranks):
    name, hypers = setting
    module = MODELS[model]().to(DTYPES[dtype])
    params = list(module.parameters())
    stacks = [i for i, p in enumerate(params) if p in expert_stacks.find(module)]

    def make(params):
        optimizer = OPTIMIZERS[name](params, **hypers)
        optimizer.stacks = dict.fromkeys((params[i] for i in stacks), 0)
        return optimizer

    made = optimizer_ranks.made(make, params, ranks)
    optimizer_ranks.step(made, [torch.randn_like(p) for p in params])
    states = [rank.optimizer.state.values() for rank in made]
    held_by = [held(t for s in state for t in tensors(s)) for state in states]
    rule = OPTIMIZERS[name].hypers(**hypers)
    for stage in (1, 2, 3):
        planned = memory.optimizer_memory(
            rule, shapes_of(module), stage, ranks, DTYPES[dtype], BUCKET
        )
        kept = planned.state + planned.master
        assert close(kept, max(held_by)), (kept, held_by)


def agreed(layout, waiting, in_parts, ended, *_):
    """What ranks that have the same gradients agree on."""
    return lambda: Agreement(waiting, set(), ended)


@pytest.fixture
def layout_of(monkeypatch):
    """Makes the layout of a model on the first of some ranks, whose collectives do nothing."""
    monkeypatch.setattr(Layout, "agree", agreed)
    with contextlib.ExitStack() as stack:

        def made(module, ranks):
            stack.enter_context(fake_rank(0, ranks))
            placement = Sharded(dist.group.WORLD)
            names = {p: name for name, p in module.named_parameters()}
            return Layout(dist.group.WORLD, names, lambda p: placement)

        yield made


def gradients_alive(module, layout, bucket, monkeypatch):
    """The most bytes of gradients alive at once in a backward pass."""
    most = 0
    own = Buckets._own

    def measured(self, param, grad):
        nonlocal most
        mine = own(self, param, grad)
        waiting = [flat for flat in self.waiting.values() if flat is not None]
        most = max(most, held([*waiting, grad, mine]))
        return mine

    monkeypatch.setattr(Buckets, "_own", measured)
    optimizer = OPTIMIZERS["lomo"](module.parameters())
    fused = FusedBackward(module, optimizer, layout, gradient_config.GradientConfig(bucket))
    tokens = torch.randint(0, 301, (1, 4))
    module(tokens, labels=tokens).loss.backward()
    fused.finish()
    fused.end_step()
    return most


# Whether a gradient is copied depends on others that read it, unless it has to be padded (5 ranks);
# and whether the bucket is full when the largest arrives, on the order.
@pytest.mark.parametrize(
    "ranks, bucket, slack",
    [(1, 1, 1.01), (5, 1, 1.01), (1, 10**9, 1.01), (5, 10**9, 1.01), (1, 3000, 1.2), (2, 1, 2.01)],
)
def test_gradients_in_flight_are_as_planned(ranks, bucket, slack, layout_of, monkeypatch):
    module = llama()
    alive = gradients_alive(module, layout_of(module, ranks), bucket, monkeypatch)
    lomo = OPTIMIZERS["lomo"].hypers()
    planned = memory.optimizer_memory(lomo, shapes_of(module), 1, ranks, torch.float32, bucket)
    assert alive <= planned.gradients * 1.001  # padding
    assert planned.gradients <= alive * slack


@pytest.mark.parametrize("ranks", [1, 5])
def test_kept_gradients_are_as_planned(ranks, layout_of):
    module = llama()
    optimizer = OPTIMIZERS["lomo"](module.parameters())
    how = gradient_config.GradientConfig(3000, "sharded")
    fused = FusedBackward(module, optimizer, layout_of(module, ranks), how)
    for _ in range(2):
        tokens = torch.randint(0, 301, (1, 4))
        module(tokens, labels=tokens).loss.backward()
        fused.finish()
    rule = OPTIMIZERS["lomo"].hypers()
    used, kept = (
        memory.optimizer_memory(
            rule, shapes_of(module), 1, ranks, torch.bfloat16, 3000, accumulates
        ).gradients
        for accumulates in (False, True)
    )
    assert held([run.g for run in fused.state.kept.values()]) == kept - used


# Closed forms. R and C are the sizes of a matrix, d the ranks.

SEVEN = benchmark.shapes_of(benchmark.LLAMAS["7B"])
N = memory.elements(SEVEN)


def plan(name, stage, ranks, dtype=torch.bfloat16, **hypers):
    rule = OPTIMIZERS[name].hypers(**hypers)
    return memory.optimizer_memory(rule, SEVEN, stage, ranks, dtype, 2**24)


def test_adalomo_holds_little_more_than_the_weights():
    whole = plan("adalomo", 0, 8)
    assert whole.state < 0.001 * whole.weights
    assert whole.weights == 2 * N == 2 * 6_738_415_616
    third = plan("adalomo", 3, 8)
    copies = sum(2 * math.prod(s) for s in SEVEN.values() if len(s) == 1)  # gathered: norms
    assert third.weights == whole.weights / 8 + copies
    bucket = 2 * (2**24 + 32000 * 4096)
    assert bucket == plan("adalomo", 1, 8).gradients
    # The head and a matrix of the last layer are not stepped yet when its next matrix arrives.
    vectors, matrix = 3 * 4096, 4096 * 11008
    assert third.gradients == 2 * (32000 * 4096 + vectors + matrix + 2**24 + matrix)
    assert plan("adalomo", 1, 7).gradients == 2 * 2 * 32000 * 4096  # padded to equal parts
    assert plan("adalomo", 0, 1).gradients == bucket


def test_adamw_without_its_copies_is_the_zero_papers():
    whole = memory.adamw(SEVEN, 0, 8, torch.bfloat16, 2**24)
    assert whole.weights + whole.state + whole.master == 14 * N  # 16 with 2 of the gradients
    third = memory.adamw(SEVEN, 3, 8, torch.bfloat16, 2**24)
    assert (third.state, third.master) == (N, N / 2)  # 12/d


# Live bytes, from allocation to release. A float takes 4 bytes.


def test_tensors_are_counted_from_when_they_are_made_until_they_are_freed():
    kept = torch.zeros(100)
    with LiveMemory([kept, kept.view(10, 10)]) as watch:
        assert watch.now == watch.most == 400
        a = torch.ones(1000)
        assert watch.now == 4400
        b = kept + 1
        assert watch.now == 4800
        del a
        assert (watch.now, watch.most) == (800, 4800)
        c = torch.ones(50)
        assert (watch.now, watch.most) == (1000, 4800)
        c.resize_(150)  # a storage that grows counts as it is
        assert watch.now == 1400
    del b, c
    assert watch.now == 400


def test_what_needs_no_memory_of_its_own_is_not_counted():
    kept = torch.ones(100)
    with LiveMemory([kept]) as watch:
        kept.mul_(2).add_(1)
        torch.mul(kept, 3, out=kept)
        parts = [kept.view(10, 10).t(), kept[3:], kept.detach(), *kept.split(30)]
        assert (watch.now, watch.most) == (400, 400)
        doubled = parts[0] * 2
        view = doubled[1:]
        del doubled
        assert watch.now == 800
        del view
        assert watch.now == 400


def test_backward_is_watched():
    w, c = torch.ones(1000, requires_grad=True), torch.ones(1000)
    with LiveMemory([w, c]) as watch:
        loss = (w * c).sum()  # the product is freed: nothing saves it
        assert (watch.now, watch.most) == (8004, 12004)
        loss.backward()  # the gradient of the loss, and the product that becomes that of w
        assert (watch.now, watch.most) == (12004, 12008)
        w.grad = None
        assert watch.now == 8004
