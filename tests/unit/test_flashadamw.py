"""FlashAdamW, Lion, and CAME and Adafactor with 8-bit momentum: their papers' algorithms on
simulated ranks, and moments of 8 bits.

The moments of the transcription are rounded as the paper rounds them: codes of 8 bits, and a scale
for 32 elements of the flattened parameter."""

import functools
import itertools

import numpy as np
import pytest
import torch

import ds_ext
from ds_ext import ops
from ds_ext.ops import companding, formats, schema
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import zeros
from ds_ext.rules import REGISTRY, all_rules
from tests.common import authors, flash, needs, paths, plain, table
from tests.common.authors import scale_of
from tests.common.choose import params
from tests.common.simulated import Formula, errors, ranks_after
from tests.common.table import SHAPES

STEPS = 5
WIDE = ((70, 90), (1500,), (7, 31, 9), (64, 32), (33,))  # cuts go through groups of most
ADAMW = {"defaults": {}, "decay": {"lr": 0.02, "weight_decay": 0.3}}
ADAMW |= {"betas-eps": {"betas": (0.8, 0.95), "eps": 0.3}}
LION = {"defaults": {}, "decay": {"lr": 0.02, "weight_decay": 0.3}, "betas": {"betas": (0.5, 0.8)}}
LION |= {"8 bits": {"nbits": 8}}
CAME = {"defaults": {"nbits": 8}, "decay": {"nbits": 8, "lr": 0.02, "weight_decay": 0.3}}
ADAFACTOR = {"defaults": {"nbits": 8, "lr": 0.02, "beta1": 0.9, "relative_step": False}}

RULES = {
    "flashadamw": (all_rules.FlashAdamW, authors.flashadamw, ADAMW),
    "lion": (all_rules.Lion, authors.lion, LION),
    "came in 8 bits": (all_rules.CAME, authors.came, CAME),
    "adafactor in 8 bits": (all_rules.Adafactor, authors.adafactor, ADAFACTOR),
}


@functools.cache
def torchs(setting, shapes):
    before, steps = table.weights(shapes), table.gradients(2 * STEPS, shapes)
    make = functools.partial(torch.optim.AdamW, **TORCHS[setting])
    return plain.stepped(make, before, steps)[0]


TORCHS = ADAMW | {"betas": {"betas": (0.8, 0.95)}, "eps": {"eps": 0.3}}
FORMULAS = {name: authors.of_paper(*of, (*SHAPES, *WIDE), STEPS) for name, of in RULES.items()}
FORMULAS["adamw"] = Formula(
    lambda setting: all_rules.AdamW(**TORCHS[setting]), torchs, TORCHS, SHAPES, 2 * STEPS
)


def test_scales_are_those_of_fp16_where_that_is_normal_and_reach_further():
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    scales = companding.scales(bits)
    assert scales.diff().min() > 0 and scales[0] == schema.MIN_SCALE == 2.0**-44
    assert scales[-1] == schema.MAX_SCALE
    assert companding.scale_codes(scales).equal(bits)
    x = torch.rand(10**4, generator=torch.Generator().manual_seed(0)) * 60 - 40
    x = torch.cat([x.exp2(), scales[1:] - scales.diff() / 2]).clamp(2.0**-44, 2.0**20 - 2.0**9)
    found = companding.scales(companding.scale_codes(x))
    assert found.tolist() == [float(scale_of(y)) for y in x]
    normal = (x >= 2.0**-14) & (x <= 65504)
    assert found[normal].equal(x[normal].half().float()) and normal.sum() > 10**4
    assert x[x < 2.0**-26].half().count_nonzero() == 0  # what the published scales lose


def small_steps(scale):
    """FlashAdamW and AdamW after gradients of a size, with an eps below all of them."""
    shape, hypers = (64, 50), {"eps": 1e-15, "weight_decay": 0.0}
    before, made = table.weights([shape]), []
    for cls in (all_rules.FlashAdamW, all_rules.AdamW):
        scaled = [[g * scale for g in grads] for grads in table.gradients(30, [shape])]
        made.append(ranks_after(cls(**hypers), before, scaled).params)
    return max(errors(*made, before))


def test_gradients_of_1e_9_keep_their_moments(monkeypatch):
    usual = small_steps(1.0)
    assert small_steps(1e-9) < 1.1 * usual < 0.2
    monkeypatch.setattr(companding, "scale_codes", lambda x: x.half().view(torch.int16))
    monkeypatch.setattr(companding, "scales", lambda x: x.view(torch.float16).float())
    assert small_steps(1.0) < 1.1 * usual
    assert small_steps(1e-9) > 0.4  # as published: both moments are 0, each step is a first one


def root_after(steps):
    """A root of v after a gradient of 1 and ``steps`` of nearly 0, over what it should be."""
    grads = [[torch.ones(32)]] + [[torch.full((32,), 1e-6)]] * steps
    ranks = ranks_after(all_rules.FlashAdamW(lr=0.0), [torch.zeros(32)], grads)
    block = next(Shard.whole((32,)).blocks())
    v = companding.SQUARES.opened(ranks.states[0][0]["v"]).block(block)
    return float(v[0, 0, 0].sqrt()) / (0.001 * 0.999**steps) ** 0.5


def test_second_moments_decay(monkeypatch):
    assert 0.6 < root_after(1000) < 1.1
    monkeypatch.setattr(companding, "SCALE_CUT", 16)  # scales in bf16
    monkeypatch.setattr(companding, "SCALE_FIRST", 83 << 7)
    assert root_after(1000) > 1.5  # they stay where they were


def test_values_beyond_all_scales_are_bounded():
    x = torch.tensor([3e7, -3e7, 1e6, 0.0] * 8)
    state = zeros(companding.MOMENT.state_spec(slice(0, 32), 32), x)
    block, run = next(Shard.whole((32,)).blocks()), companding.MOMENT.opened(state)
    run.write_(block, x.view(1, 1, 32))
    assert run.block(block).view(-1)[:2].tolist() == [schema.MAX_SCALE, -schema.MAX_SCALE]
    state = zeros(companding.SQUARES.state_spec(slice(0, 32), 32), x)
    run = companding.SQUARES.opened(state)
    run.write_(block, x.square().view(1, 1, 32))
    assert run.block(block).isfinite().all()


def test_only_runs_of_whole_groups_are_batched():
    for world, whole in ((2, True), (3, False)):
        shard = Shard.of_rank((64, 32), 0, world)
        assert formats.splits_groups(shard, 32) != whole
        assert REGISTRY["flashadamw"].batches(all_rules.FlashAdamW(), shard) == whole
        assert REGISTRY["lion"].batches(all_rules.Lion(nbits=8), shard) == whole
        assert REGISTRY["lion"].batches(all_rules.Lion(), shard)


def test_cuts_through_groups_are_found_without_listing_them():
    for size, world, shape in itertools.product((1, 2, 32), (1, 2, 3, 5), ((64, 3), (7,), (0,))):
        shards = [Shard.of_rank(shape, rank, world) for rank in range(world)]
        expected = any(at % size for s in shards for at in s.starts)
        assert all(formats.splits_groups(s, size) == expected for s in shards)
        if shape != (0,):
            assert formats.splits_groups(ops.Batch(shards[:1] * 2), size) == expected


SIZES = (4 * 4096, 4999)  # tiles of vectors, and others with half a group
ODD = (0.0, -0.0, 1e-9, -1e-9, 1e-20, 1e-40, -1e-45, 1e5, 3e7)
HUGE = (1.8e19, -1.9e19, 1e30, -3.4e38)  # squares of three are infinite
ADAM = [{}, {"eps": 1e-30}, {"betas": (0.4, 0.3)}, {"betas": (0.0, 0.9)}]
CASES = [("FlashAdamW", hypers) for hypers in ADAM]
CASES += [("Lion", {"nbits": 8}), ("Lion", {"nbits": 8, "betas": (0.3, 0.2)})]


def gradients(is_huge):
    """Numbers of all sizes."""
    draw = torch.Generator().manual_seed(0)
    for n in SIZES:
        g = torch.randn(n, generator=draw)
        spread = torch.randint(-40, 10, (n // 32 + 1,), generator=draw).repeat_interleave(32)[:n]
        g *= spread.float().exp2()
        for i, x in enumerate((*ODD, *HUGE) if is_huge else ODD):
            g[i::101] = x
        yield g


def after_a_step(name, hypers, path, monkeypatch):
    """Weights and states after one step from all codes and many scales."""
    paths.use(monkeypatch, path)
    draw = torch.Generator().manual_seed(1)
    before = [torch.randn(n, generator=draw) for n in SIZES]
    ps = [torch.nn.Parameter(x.clone()) for x in before]
    optimizer = getattr(ds_ext, name)(ps, lr=1e-2, weight_decay=0.1, **hypers)
    for p in ps:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    states = [
        optimizer.state[p][key] for p in ps for key in ("m", "v") if key in optimizer.state[p]
    ]
    for moment in states:
        code, scale = moment["code"], moment["scale"]
        least = -127 if code.dtype == torch.int8 else 0
        code.copy_(torch.randint(least, least + 255, code.shape, generator=draw))
        scale.copy_(torch.randint(-(2**15), 2**15, scale.shape, generator=draw))
        code[:255], scale[0], scale[-1] = torch.arange(least, least + 255), 0, -1
    huge = hypers.get("betas", (0.9, 0.999))[1] > 0.5  # else v is infinite minus infinite
    for p, g in zip(ps, gradients(huge), strict=True):
        p.grad = g
    optimizer.step()
    assert not any(p.equal(x) for p, x in zip(ps, before, strict=True))
    found = [x for moment in states for x in (moment["code"], moment["scale"])]
    return [*(p.detach().view(torch.int32) for p in ps), *found]


@needs.triton
@pytest.mark.parametrize("name, hypers", params(CASES, [CASES[0], CASES[-1]]))
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_any_number_has_the_bits_of_the_ops(name, hypers, monkeypatch):
    expected = after_a_step(name, hypers, "ops", monkeypatch)
    for path in ("native", "kernels"):
        for found, want in zip(
            after_a_step(name, hypers, path, monkeypatch), expected, strict=True
        ):
            assert found.equal(want), (path, (found != want).nonzero().view(-1)[:9])


@needs.triton
@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="it replaces the approximations of the interpreter, which a GPU does not use",
)
@pytest.mark.parametrize("toward", [-np.inf, np.inf])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_bits_do_not_depend_on_the_last_bit_of_approximations(toward, monkeypatch):
    """A GPU's reciprocals and roots are inexact before they are corrected."""
    from triton.runtime.interpreter import InterpreterBuilder

    expected, made = after_a_step("FlashAdamW", {}, "ops", monkeypatch), []
    for name in ("create_fdiv", "create_rsqrt"):
        monkeypatch.setattr(InterpreterBuilder, name, inexact(name, toward, made))
    found = after_a_step("FlashAdamW", {}, "kernels", monkeypatch)
    assert {*made} == {"create_fdiv", "create_rsqrt"} and all(map(torch.equal, found, expected))


def inexact(name, toward, made):
    """An operation of Triton's interpreter with an error of one unit in the last place."""
    from triton.runtime.interpreter import InterpreterBuilder

    exact = getattr(InterpreterBuilder, name)

    def operation(*args):
        made.append(name)
        handle = exact(*args)
        handle.data = np.nextafter(handle.data, np.float32(toward))
        return handle

    return operation


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MATRICES = ((33, 47), (1000,), (5, 7, 3))  # none is whole groups of 32
MANY = 10
SAME = {
    "lr": 0.2,  # large, so that little of an update is lost beside its weight
    "betas": (0.8, 0.95),
    "weight_decay": 0.1,
}
# Ours and theirs, and the moments that both keep.
PAIRS = {
    "FlashAdamW": (ds_ext.FlashAdamW, flash.FlashAdamW, {}, {"m": "exp_avg", "v": "exp_avg_sq"}),
    "Lion": (ds_ext.Lion, flash.FlashLion, {"nbits": 8}, {"m": "exp_avg"}),
}


def tensors(seed, dtype):
    """One of each shape, in which the first rows are larger than the last."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    sizes = [torch.linspace(2, 0.2, s[0]).view(-1, *[1] * (len(s) - 1)) for s in MATRICES]
    return [(normal(*s) * x).to(DEVICE, dtype) for s, x in zip(MATRICES, sizes, strict=True)]


def trained(name, dtype, ours, theirs):
    """Ten steps by both -> weights before, and for each of both its weights and their states."""
    mine, authors, extra, _ = PAIRS[name]
    before, ended = tensors(0, dtype), []
    with flash.runnable():
        for cls, more in ((mine, extra | ours), (authors, theirs)):
            params = [torch.nn.Parameter(p.clone()) for p in before]
            optimizer = cls(params, **SAME, **more)
            for step in range(MANY):
                for p, g in zip(params, tensors(1 + step, dtype), strict=True):
                    p.grad = g
                optimizer.step()
            ended.append([(p.detach(), optimizer.state[p]) for p in params])
    return before, *ended


def moments(name, own, theirs):
    """Codes of both; scales are the same."""
    for key, key_of_theirs in PAIRS[name][3].items():
        moment = theirs[key_of_theirs]
        assert moment.scales.min() >= 2.0**-14  # normal
        assert companding.scales(own[key]["scale"]).equal(moment.scales.float())
        yield own[key]["code"].int(), moment.quantized.flatten().int()


@pytest.mark.parametrize("path", ["native", "ops"])
@pytest.mark.parametrize("name", PAIRS)
def test_ten_steps_end_with_the_scales_and_codes_of_flashoptim(name, path, monkeypatch):
    """But for a code in a thousand, where the last bits of a moment put it on the other side."""
    paths.use(monkeypatch, path)
    before, *ended = trained(name, torch.float32, {}, {"master_weight_bits": None})
    assert max(errors(*([p for p, _ in one] for one in ended), before)) <= 2e-6
    pairs = [moments(name, own, theirs) for (_, own), (_, theirs) in zip(*ended, strict=True)]
    ours, theirs = (torch.cat(codes) for codes in zip(*itertools.chain(*pairs), strict=True))
    assert (ours - theirs).abs().max() <= 1 and (ours != theirs).float().mean() <= 1e-3


def whole(p, errors):
    """An fp16 weight and what its 8 bits stand for, in fp64."""
    half = torch.frexp(p)[1].clamp(min=-13) - 12  # the exponent of half the spacing there
    return p.double() + torch.ldexp(errors.view(p.shape).double() / 127, half)


def test_weights_of_24_bits_are_those_of_flashoptim():
    """Of fp16: the interpreter does not round to bf16."""
    before, mine, authors = trained(
        "FlashAdamW", torch.float16, {"weight_update": "master24"}, {"master_weight_bits": 24}
    )
    ours = [whole(p, state["master"]) for p, state in mine]
    theirs = [whole(p, state["error_bits"]) for p, state in authors]
    assert max(errors(ours, theirs, before)) <= 1e-5
    assert max(errors([p for p, _ in mine], theirs, before)) > 1e-4  # the bits matter
