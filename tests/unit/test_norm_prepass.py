"""The backward pass that measures leaves nothing behind: exact clipping of unusual graphs."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

import ds_ext
from ds_ext.backward import norm_prepass
from tests.common import fused_losses

CLIP = 0.05


def fuse(model, **how):
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.5)
    return optimizer, ds_ext.fuse_into_backward(model, optimizer, max_grad_norm=CLIP, **how)


def ordinary_step(model, loss):
    """One of SGD, which LOMO's is, with torch's own clipping."""
    model.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def state(model):
    return {n: x.detach().clone() for n, x in model.state_dict().items()}


def assert_updates_equal(model, plain, before):
    for n, expected in plain.state_dict().items():
        error = (model.state_dict()[n] - expected).double().norm()
        assert error <= 1e-5 * (expected - before[n]).double().norm(), n


@pytest.mark.parametrize("held", ["saved", "attribute"])
def test_a_loss_that_writes_its_saved_gradients_in_place_is_refused_before_a_weight_moves(held):
    model = fused_losses.make(held, factor=2.0)
    optimizer, fused = fuse(model)
    before = state(model)
    with pytest.raises(RuntimeError, match='InPlaceCrossEntropy.*gradient_policy="sharded"'):
        fused.backward(model(*fused_losses.batch(0)))
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    model.factor = 1.0  # a multiplication by one harms nothing
    fused.backward(model(*fused_losses.batch(1)))
    optimizer.step()
    plain = fused_losses.make(None)
    ordinary_step(plain, plain(*fused_losses.batch(1)))
    assert_updates_equal(model, plain, before)


class Normed(nn.Module):
    """Batch norms, one of them in a checkpointed segment."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9))
        self.second = nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9, affine=False), nn.Tanh())
        self.register_buffer("calls", torch.zeros(()))
        self.last = nn.Linear(9, 4)

    def segment(self, h):
        self.calls = self.calls + 1  # a new tensor each time
        return self.second(h)

    def forward(self, x):
        h = checkpoint(self.segment, self.first(x), use_reentrant=self.reentrant)
        return self.last(h).square().sum()


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
    before = state(plain)
    optimizer, fused = fuse(model, bucket_size=1)
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        with caplog.at_level("INFO", "ds_ext"), around():
            loss = model(x)
            fused.backward(loss)
        assert bool(fused.state.keeps) == (named is not None)
        optimizer.step()
        ordinary_step(plain, plain(x))
    assert_updates_equal(model, plain, before)
    told = [line for line in caplog.messages if "gradients are kept" in line]
    assert len(told) == (named is not None) and all(named in line for line in told)


@pytest.mark.parametrize("context_fn", [noop_context_fn, SELECTIVE])
def test_the_hooks_of_int8_weights_neither_keep_gradients_nor_hide_others(context_fn):
    model = nn.Sequential(nn.Linear(256, 256, bias=False)).bfloat16()
    ds_ext.store_int8(model)
    fused = fuse(model)[1]
    x = torch.randn(4, 256, dtype=torch.bfloat16, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=False, context_fn=context_fn)
    fused.backward(y.sum())
    assert bool(fused.state.keeps) == (context_fn is SELECTIVE)


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
