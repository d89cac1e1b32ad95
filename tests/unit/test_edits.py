"""A bf16 weight that someone sets between steps is what it was set to; others keep their bits."""

import copy

import pytest
import torch
from torch import nn

from ds_ext.ops import fingerprints, passes, weight_update
from ds_ext.optimizer import OPTIMIZERS
from tests.common import needs, paths, table
from tests.unit.test_precision import SETTINGS
from tests.unit.test_precision import number as held

SHAPES = ((600,), (13, 290), (3, 40, 30))
PATHS = ["ops", "native", pytest.param("kernels", marks=needs.triton)]
by_path = pytest.mark.parametrize("path", PATHS)


@pytest.fixture
def path(request, monkeypatch):
    paths.use(monkeypatch, request.param)


def twins(name, shapes=SHAPES):
    """Weights in bf16 with a master, and in fp32 -> parameters, a step of each by its gradients."""
    before = table.weights(shapes, torch.bfloat16)
    kept = [nn.Parameter(p.clone()) for p in before]
    exact = [nn.Parameter(p.float()) for p in before]
    made = [
        OPTIMIZERS[name](params, **SETTINGS[name], weight_update=mode)
        for params, mode in ((kept, "master"), (exact, "nearest"))
    ]

    def step(gradients):
        for p, q, g in zip(kept, exact, gradients, strict=True):
            p.grad, q.grad = g.clone(), g.float()
        for optimizer in made:
            optimizer.step()

    return kept, exact, made[0], step


def zero_rows(p):
    p[1::3] = 0


def prune(p):
    p.mul_((torch.arange(p.numel()).view(p.shape) % 3 > 0).to(p.dtype))


def negate_nothing_to_zero(p):
    p.copy_(-0.0 * p.abs())


def load(p):
    p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(7), device="cpu"))


EDITS = {f.__name__: f for f in (zero_rows, prune, negate_nothing_to_zero, load)}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("name", ["lomo", "adalomo", "came"])
@pytest.mark.parametrize("path", ["ops"], indirect=True)
def test_a_step_after_an_edit_is_that_of_fp32(name, edit, path):
    kept, exact, optimizer, step = twins(name)
    for gradients in table.gradients(4, SHAPES, torch.bfloat16):
        step(gradients)
        for p, q in zip(kept, exact, strict=True):
            assert held(optimizer, p).equal(q)
            edit(p.data)  # which version counters do not see
            edit(q.data)
            if edit is load:
                q.data.copy_(p)
            assert held(optimizer, p).equal(q)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@by_path
def test_24_bits_are_taken_as_they_were_set(path, edit, half, monkeypatch):
    paths.use(monkeypatch, path)
    shapes = SHAPES if path != "kernels" else SHAPES[:2]
    kept = [nn.Parameter(p) for p in table.weights(shapes, half)]
    optimizer = OPTIMIZERS["lomo"](kept, lr=0.01, weight_update="master24")
    for gradients in [*table.gradients(2, shapes, half), None]:
        for p, g in zip(kept, gradients or [torch.zeros_like(p) for p in kept], strict=True):
            p.grad = g
        if gradients is None:
            before = [held(optimizer, p) for p in kept]
            assert all((x != p).float().mean() > 0.9 for x, p in zip(before, kept, strict=True))
            for p in kept:
                edit(p.data)
            after = [held(optimizer, p) for p in kept]
        optimizer.step()
    for p, x, y in zip(kept, before, after, strict=True):
        assert y.equal(p.float() if edit is load else x.where(p != 0, 0))
        assert held(optimizer, p).equal(y)  # after a step by nothing


@needs.triton
@pytest.mark.parametrize("size", [torch.int8, torch.int16])
@pytest.mark.parametrize("path", ["kernels"], indirect=True)
def test_kernels_mark_and_mend_as_the_ops_do(path, size, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    for n in (1, 255, 256, 257, 9001):
        numbers = torch.randint(-(2**15), 2**15, (2, n), generator=generator, device="cpu")
        bits, rest = numbers.to(paths.DEVICE)
        bits, rest = bits.to(torch.int16), rest.to(size)
        run = bits.view(torch.bfloat16)
        marked = weight_update.marks(run)
        changed = run.clone()
        changed[: n // 3] = torch.randn(n // 3, generator=generator, device="cpu").bfloat16()
        changed[n // 3 : n // 2 : 7] = 0
        found = [rest.clone() for _ in range(3)]
        before = copy.deepcopy(found)
        for r, (w, m) in zip(found, ((run, None), (run, marked), (changed, marked)), strict=True):
            passes.mend_([(w, r, m)])
        paths.use(monkeypatch, "ops")
        assert weight_update.marks(run).equal(marked)
        for r, (w, m) in zip(before, ((run, None), (run, marked), (changed, marked)), strict=True):
            passes.mend_([(w, r, m)])
        assert all(a.equal(b) for a, b in zip(found, before, strict=True))
        paths.use(monkeypatch, "kernels")


@pytest.mark.parametrize(
    "path", [*PATHS[:2], pytest.param("kernels", marks=[needs.triton, pytest.mark.slow])]
)
def test_no_pair_is_a_nan_where_the_weight_is_none(path, monkeypatch):
    """With every weight and what may be left, also of a state without marks: an older file's."""
    paths.use(monkeypatch, path)
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    for left in (-(2**15), -1, 1, 2**15 - 1):
        p = nn.Parameter(every.clone())
        optimizer = OPTIMIZERS["lomo"]([p], lr=0.0, weight_update="master")
        p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.state[p]["master"].fill_(left)
        for marked in (None, optimizer.state[p]["marks"]):
            optimizer.state[p]["marks"] = marked
            assert held(optimizer, p).isnan().equal(p.isnan())
        optimizer.state[p].pop("marks")
        optimizer.step()
        assert p.isnan().equal(every.isnan())


def test_a_changed_weight_takes_its_group_along_and_zeroed_ones_themselves_alone():
    kept, _, optimizer, step = twins("lomo", [(4 * fingerprints.GROUP,)])
    (gradients,) = table.gradients(1, [(4 * fingerprints.GROUP,)], torch.bfloat16)
    step(gradients)
    (p,) = kept
    before = held(optimizer, p)
    assert (before.bfloat16() == p).all() and (before != p).float().mean() > 0.9
    p.data[3] = 0.125
    p.data[fingerprints.GROUP + 3] = 0.0
    after = held(optimizer, p)
    g = fingerprints.GROUP
    assert after[:g].equal(p[:g].float())
    same = after == before
    assert same[g:].sum() == 3 * g - 1 and after[g + 3] == 0


def test_weights_that_are_put_back_keep_what_is_left_of_them():
    """As those of an average that is swapped in for an evaluation."""
    kept, exact, optimizer, step = twins("adalomo")
    for gradients in table.gradients(3, SHAPES, torch.bfloat16):
        saved = [p.detach().clone() for p in kept]
        for p in kept:
            load(p.data)
        for p, x in zip(kept, saved, strict=True):
            p.data.copy_(x)
        step(gradients)
    assert all(held(optimizer, p).equal(q) for p, q in zip(kept, exact, strict=True))
