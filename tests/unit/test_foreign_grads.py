"""Exact clipping measures by a backward pass of its own: gradients of others see one pass."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_ext
from ds_ext.backward import foreign_grads

CLIP = 0.05
WAYS = ("plain", "reentrant", "nonreentrant")


class Whole(nn.Module):
    """A body that is fused, and a head with an optimizer of its own, in a segment or not."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)
        self.prompt = torch.ones(8, requires_grad=True)  # a leaf that is no parameter

    def after(self, h):
        return torch.tanh(self.head(h * self.prompt))

    def forward(self, x):
        self.hidden = self.body(x)
        self.hidden.retain_grad()
        if self.way == "plain":
            return self.after(self.hidden).square().sum()
        made = checkpoint(self.after, self.hidden, use_reentrant=self.way == "reentrant")
        return made.square().sum()


def make(way):
    torch.manual_seed(2)
    return Whole(way)


def others(model, x):
    return {
        "head.weight": model.head.weight,
        "head.bias": model.head.bias,
        "prompt": model.prompt,
        "input": x,
        "hidden": model.hidden,
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
def test_gradients_of_others_are_those_of_one_pass(way, has_grad, is_whole):
    """Of a head beside the fused model, or of parameters of the model in no group."""
    model, plain = make(way), make(way)
    optimizer = ds_ext.LOMO(model.body.parameters(), lr=0.5)
    fused = ds_ext.fuse_into_backward(
        model if is_whole else model.body, optimizer, max_grad_norm=CLIP
    )
    called = []
    for m in (model, plain):
        m.head.bias.register_post_accumulate_grad_hook(lambda p: called.append(p))
    for step in range(3):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        x, y = (batch.clone().requires_grad_() for _ in range(2))
        if has_grad:
            for each in (model.head.weight, plain.head.weight, x, y, model.prompt, plain.prompt):
                each.grad = torch.full_like(each, 0.25)
        kept = x.grad
        fused.backward(model(x))
        plain(y).backward()
        assert x.grad is kept or not has_grad  # added to in place, as torch does
        wanted = others(plain, y)
        for name, tensor in others(model, x).items():
            torch.testing.assert_close(tensor.grad, wanted[name].grad, msg=name)
        assert [id(p) for p in called] == [id(m.head.bias) for m in (model, plain)]
        called.clear()
        optimizer.step()
        assert fused.norm == pytest.approx(
            float(torch.nn.utils.clip_grad_norm_(plain.body.parameters(), CLIP)), rel=1e-5
        )
        torch.optim.SGD(plain.body.parameters(), lr=0.5).step()
        for m in (model, plain):
            torch.optim.SGD(m.head.parameters(), lr=0.1).step()
            m.zero_grad(set_to_none=step == 0)
            m.prompt.grad = None
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert not foreign_grads._passes


def losses(models, x):
    a, b = models
    return (torch.tanh(a(x)) * b(x)).sum()


def pair():
    torch.manual_seed(3)
    return nn.Linear(6, 4), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


@pytest.mark.parametrize("bucket_size", [10, None])
def test_two_models_in_one_loss_both_clip_exactly(bucket_size):
    models, plains = pair(), pair()
    optimizers = [ds_ext.LOMO(m.parameters(), lr=0.5) for m in models]
    fused = [
        ds_ext.fuse_into_backward(m, o, bucket_size=bucket_size, max_grad_norm=CLIP)
        for m, o in zip(models, optimizers, strict=True)
    ]
    for step in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        fused[step % 2].backward(losses(models, x))
        losses(plains, x).backward()
        for m, o, f, p in zip(models, optimizers, fused, plains, strict=True):
            o.step()
            norm = torch.nn.utils.clip_grad_norm_(p.parameters(), CLIP)
            assert f.norm == pytest.approx(float(norm), rel=1e-5)
            torch.optim.SGD(p.parameters(), lr=0.5).step()
            p.zero_grad()
            for got, wanted in zip(m.parameters(), p.parameters(), strict=True):
                torch.testing.assert_close(got, wanted)


def test_a_second_loss_of_a_step_is_refused_and_not_dropped_however_large_buckets_are():
    model = make("plain")
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.5)
    fused = ds_ext.fuse_into_backward(model, optimizer, bucket_size=10**6, max_grad_norm=CLIP)
    fused.backward(model(torch.ones(2, 6)))
    with pytest.raises(RuntimeError, match="second gradient"):
        fused.backward(model(torch.ones(2, 6)))
    optimizer.zero_grad()
    fused.backward(model(torch.ones(2, 6)))
    assert optimizer.step() is None and fused.norm > 0


def discard_in_parts(fused, model):
    fused.backward(model(torch.ones(2, 6)))
    for part in model.children():
        part.zero_grad()


def measure_only(fused, model):
    fused.measure_norm(model(torch.ones(2, 6)))


def fail_after_measuring(fused, model):
    passes = []

    def fail_once_measured(grad):
        passes.append(grad)
        if len(passes) == 2:
            raise Failure

    loss = model(torch.ones(2, 6))
    loss.register_hook(fail_once_measured)
    with pytest.raises(Failure):
        fused.backward(loss)


@pytest.mark.parametrize("abandon", [discard_in_parts, measure_only, fail_after_measuring])
def test_a_measured_batch_that_is_not_stepped_is_discarded_before_the_next(abandon):
    model, plain = make("plain"), make("plain")
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.5)
    fused = ds_ext.fuse_into_backward(model, optimizer, bucket_size=10**6, max_grad_norm=CLIP)
    abandon(fused, model)
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\) of the whole model"):
        fused.backward(model(batch))
    model.zero_grad()
    fused.backward(model(batch))
    optimizer.step()
    plain(batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
    assert fused.norm == pytest.approx(float(norm), rel=1e-5)


class Failure(BaseException):
    """Such as KeyboardInterrupt, which is no Exception."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("discard", [False, True])
@pytest.mark.parametrize("bucket_size", [10, 10**6])
def test_after_an_error_in_the_measuring_pass_the_next_batch_trains_right(
    way, discard, bucket_size
):
    model, plain = make(way), make(way)
    optimizer = ds_ext.LOMO(model.body.parameters(), lr=0.5)
    fused = ds_ext.fuse_into_backward(
        model.body, optimizer, bucket_size=bucket_size, max_grad_norm=CLIP
    )
    before = [p.detach().clone() for p in model.parameters()]

    def fail(grad):
        raise Failure

    for place in ("first", "last", "input"):
        x = torch.ones(4, 6, requires_grad=True)
        loss = model(x)
        if place == "last":
            model.head.weight.register_hook(fail)
        hooked = {"first": model.body[0].weight, "last": model.head.weight, "input": x}[place]
        handle = hooked.register_hook(fail)
        with pytest.raises(Failure):
            fused.backward(loss)
        handle.remove()
        model.head.weight._backward_hooks = None
        assert all(map(torch.equal, model.parameters(), before))
        assert x.grad is model.head.weight.grad is model.prompt.grad is None
        assert not fused.unfinished() and not foreign_grads._passes
        if discard:
            optimizer.zero_grad()
    x = torch.randn(4, 6)
    fused.backward(model(x))
    optimizer.step()
    plain(x).backward()
    torch.nn.utils.clip_grad_norm_(plain.body.parameters(), CLIP)
    torch.optim.SGD(plain.body.parameters(), lr=0.5).step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    torch.testing.assert_close(model.head.weight.grad, plain.head.weight.grad)
