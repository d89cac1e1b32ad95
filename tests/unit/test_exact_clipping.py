"""Exact clipping: the backward pass that measures the norm leaves nothing behind.

Gradients of others see one pass, and a graph that runs backward once keeps its gradients.
"""

import contextlib
import copy
import functools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

import ds_ext
from ds_ext.backward import foreign_grads, norm_prepass
from tests.common import fused_losses, plain, updates
from tests.common.choose import params
from tests.common.plain import mean_step, weights

CLIP = 0.05
WAYS = ("plain", "reentrant", "nonreentrant")
fuse = functools.partial(plain.fuse, lr=0.5, max_grad_norm=CLIP)


class Failure(BaseException):
    """Such as KeyboardInterrupt, which is no Exception."""


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
    torch.testing.assert_close([*model.parameters()], [*plain.parameters()])
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
    fused, optimizers = zip(*(fuse(m, bucket_size=bucket_size) for m in models), strict=True)
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
            torch.testing.assert_close([*m.parameters()], [*p.parameters()])


def discard_in_parts(fused, model):
    fused.backward(model(torch.ones(2, 6)))
    for part in model.children():
        part.zero_grad()


def measure_only(fused, model):
    before = [p.detach().clone() for p in model.parameters()]
    fused.measure_norm(model(torch.ones(2, 6)))
    assert all(map(torch.equal, model.parameters(), before))
    assert not fused.optimizer.state and not fused.state.kept
    assert all(p.grad is None for p in model.parameters())


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
    fused, optimizer = fuse(model, bucket_size=10**6)
    abandon(fused, model)
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\) of the whole model"):
        fused.backward(model(batch))
    model.zero_grad()
    fused.backward(model(batch))
    optimizer.step()
    assert fused.norm == pytest.approx(ordinary_step(plain, plain(batch)), rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("discard", [False, True])
@pytest.mark.parametrize("bucket_size", [10, 10**6])
def test_after_an_error_in_the_measuring_pass_the_next_batch_trains_right(
    way, discard, bucket_size
):
    model, plain = make(way), make(way)
    fused, optimizer = fuse(model.body, bucket_size=bucket_size)
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
        assert not fused.own_loss_is_running
        if discard:
            optimizer.zero_grad()
    x = torch.randn(4, 6)
    loss = model(x)
    assert {*fused.buckets.uses.count.values()} == {1}  # the failed passes' uses are forgotten
    fused.backward(loss)
    optimizer.step()
    ordinary_step(plain.body, plain(x))
    torch.testing.assert_close([*model.parameters()], [*plain.parameters()])
    torch.testing.assert_close(model.head.weight.grad, plain.head.weight.grad)


def ordinary_step(model, loss):
    """One of SGD, which LOMO's is, with torch's own clipping -> the norm."""
    return mean_step(torch.optim.SGD(model.parameters(), lr=0.5), [loss], CLIP)


@pytest.mark.parametrize("held", ["saved", "attribute"])
def test_a_loss_that_writes_its_saved_gradients_in_place_is_refused_before_a_weight_moves(held):
    model = fused_losses.make(held, factor=2.0)
    fused, optimizer = fuse(model)
    before = weights(model)
    with pytest.raises(RuntimeError, match='InPlaceCrossEntropy.*gradient_policy="sharded"'):
        fused.backward(model(*fused_losses.batch(0)))
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    model.factor = 1.0  # a multiplication by one harms nothing
    fused.backward(model(*fused_losses.batch(1)))
    optimizer.step()
    plain = fused_losses.make(None)
    ordinary_step(plain, plain(*fused_losses.batch(1)))
    updates.check_each(weights(model), weights(plain), before)


class Segmented(nn.Module):
    """A checkpointed segment between two layers."""

    def __init__(self, context_fn=noop_context_fn) -> None:
        super().__init__()
        self.context_fn = context_fn
        self.first, self.second, self.last = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 4)

    def forward(self, x):
        h = checkpoint(
            lambda h: torch.tanh(self.second(torch.tanh(h))),
            self.first(x),
            use_reentrant=False,
            context_fn=self.context_fn,
        )
        return self.last(h).square().sum()


def trl_offloading():
    """TRL's own, which takes its accelerator for a GPU here, and leaves tensors of a CPU there."""
    with mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cuda")):
        from trl.models.activation_offloading import OffloadActivations

        return OffloadActivations(use_pin_memory=False, use_streams=False)


def single_use_hooks():
    held: list[torch.Tensor | None] = []

    def pack(x):
        held.append(x)
        return len(held) - 1

    def unpack(index):
        x, held[index] = held[index], None
        return x

    return saved_tensors_hooks(pack, unpack)


@contextlib.contextmanager
def own_context():
    yield


SELECTIVE = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
)
# By name: the contexts of the segment, the context of the forward pass, what the log names.
GRAPHS = {
    "plain": (noop_context_fn, contextlib.nullcontext, None),
    "on the host": (noop_context_fn, save_on_cpu, None),
    "selective": (SELECTIVE, contextlib.nullcontext, "checkpointing with a context_fn"),
    "context": (
        lambda: (own_context(), own_context()),
        contextlib.nullcontext,
        "checkpointing with a context_fn",
    ),
    "trl": (noop_context_fn, trl_offloading, "saved_tensors_hooks of trl.models"),
    "hooks": (noop_context_fn, single_use_hooks, "saved_tensors_hooks of tests.unit"),
}


@pytest.mark.parametrize("kind", GRAPHS)
def test_a_graph_that_runs_backward_once_is_clipped_exactly_by_kept_gradients(kind, caplog):
    context_fn, around, named = GRAPHS[kind]
    torch.manual_seed(5)
    model, plain = Segmented(context_fn), Segmented()
    plain.load_state_dict(model.state_dict())
    before = weights(plain)
    fused, optimizer = fuse(model, bucket_size=1)
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        with caplog.at_level("INFO", "ds_ext"), around():
            loss = model(x)
            fused.backward(loss)
        assert bool(fused.state.kept) == (named is not None)
        optimizer.step()
        ordinary_step(plain, plain(x))
    updates.check_each(weights(model), weights(plain), before)
    told = [line for line in caplog.messages if "gradients are kept" in line]
    assert len(told) == (named is not None) and all(named in line for line in told)


COMPILED = ["fresh", "an ordinary pass before", "other sizes"]


@pytest.mark.parametrize("case", params(COMPILED, COMPILED[:2]))
def test_a_compiled_model_is_clipped_exactly_whatever_was_compiled_before(case, caplog):
    """Its backward overwrites donated buffers, unless its first pass keeps the graph."""
    torch._dynamo.reset()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 4))
    plain, run = copy.deepcopy(model), torch.compile(model, backend="aot_eager")
    before = weights(plain)
    if case == "an ordinary pass before":
        run(torch.randn(8, 6)).sum().backward()
        model.zero_grad()
    fused, optimizer = fuse(model, bucket_size=1)
    for step in range(3):
        x = torch.randn(8 - step * (case == "other sizes"), 6)
        with caplog.at_level("INFO", "ds_ext"):
            fused.backward(run(x).square().sum())
        optimizer.step()
        ordinary_step(plain, plain(x).square().sum())
    updates.check_each(weights(model), weights(plain), before)
    told = [line for line in caplog.messages if "gradients are kept" in line]
    assert len(told) == (case != "fresh") and all("torch.compile" in line for line in told)


@pytest.mark.parametrize("context_fn", [noop_context_fn, SELECTIVE])
def test_the_hooks_of_int8_weights_neither_keep_gradients_nor_hide_others(context_fn):
    model = nn.Sequential(nn.Linear(256, 256, bias=False)).bfloat16()
    ds_ext.store_int8(model)
    fused, _ = fuse(model)
    x = torch.randn(4, 256, dtype=torch.bfloat16, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=False, context_fn=context_fn)
    fused.backward(y.sum())
    assert bool(fused.state.kept) == (context_fn is SELECTIVE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_any_change_of_a_saved_tensor_is_found(dtype):
    whole = torch.arange(40).to(dtype).view(5, 8)
    for x in (whole, whole[1:, 1:], whole.t(), whole[0, :3], whole[0, 0], whole.flatten()[1:]):
        before = norm_prepass._digest(x)
        assert before == norm_prepass._digest(x.clone())
        last = tuple(n - 1 for n in x.shape)
        kept = x[last].clone()
        x[last] = ~kept if dtype == torch.bool else kept + 1
        assert before != norm_prepass._digest(x)
        x[last] = kept
