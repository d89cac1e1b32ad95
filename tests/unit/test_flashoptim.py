"""FlashAdamW and Lion with 8 bits are the optimizers of their authors' package: flashoptim.

Gradients are such that scales are normal numbers of fp16, where both keep the same ones.
"""

import itertools

import pytest
import torch

import ds_ext
from ds_ext.ops import companding
from tests.common import flash, paths
from tests.common.simulated import errors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((33, 47), (1000,), (5, 7, 3))  # none is whole groups of 32
STEPS = 10
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

    sizes = [torch.linspace(2, 0.2, s[0]).view(-1, *[1] * (len(s) - 1)) for s in SHAPES]
    return [(normal(*s) * x).to(DEVICE, dtype) for s, x in zip(SHAPES, sizes, strict=True)]


def trained(name, dtype, ours, theirs):
    """Ten steps by both -> weights before, and for each of both its weights and their states."""
    mine, authors, extra, _ = PAIRS[name]
    before, ended = tensors(0, dtype), []
    with flash.runnable():
        for cls, more in ((mine, extra | ours), (authors, theirs)):
            params = [torch.nn.Parameter(p.clone()) for p in before]
            optimizer = cls(params, **SAME, **more)
            for step in range(STEPS):
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
