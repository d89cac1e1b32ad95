"""Who steps a model: one of several owners, its copies, or one of several threads.

Copies of a model and its optimizer: tests/scenarios.
"""

import copy
import functools
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_ext
from ds_ext.backward import owners
from ds_ext.backward.buckets import Buckets
from ds_ext.backward.partial_grads import ModuleCalls
from tests.common import models, paths
from tests.common.choose import params
from tests.common.plain import fuse, mean_step
from tests.common.states import from_file

make = functools.partial(models.layers, 6, 9, 4)


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    return model(torch.randn(3, 6, generator=torch.Generator().manual_seed(step))).square().sum()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a, b) -> bool:
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("how", [{}, {"max_grad_norm": 0.1}, {"gradient_policy": "sharded"}])
def test_the_newer_takes_over_and_says_so(how, caplog):
    model, plain = make(), make()
    older, first = fuse(model, lr=5.0, **how)
    newer, second = fuse(model, **how)
    assert caplog.text.count("takes over") == 1
    expected, alone = fuse(plain, **how)
    for step in range(3):
        newer.backward(loss_of(model, step))
        second.step()
        expected.backward(loss_of(plain, step))
        alone.step()
    assert equal(model.parameters(), plain.parameters())
    assert not equal(model.parameters(), make().parameters())
    before = weights(model)
    with pytest.raises(RuntimeError, match="another engine"):
        first.step()
    with pytest.raises(RuntimeError, match="another engine"):
        older.backward(loss_of(model))
    assert equal(model.parameters(), before)


def test_an_optimizer_may_be_fused_again(caplog):
    model, plain = make(), make()
    _, optimizer = fuse(model, lr=0.1)
    _, other = fuse(model, lr=0.2)
    newest = ds_ext.fuse_into_backward(model, optimizer)
    _, alone = fuse(plain)
    for m, o in ((model, optimizer), (plain, alone)):
        loss_of(m).backward()
        o.step()
    assert equal(model.parameters(), plain.parameters())
    newest.remove()
    assert caplog.text.count("takes over") == 2


def test_removing_gives_back_an_ordinary_model_without_a_warning(caplog):
    model = make()
    fused, _ = fuse(model)
    fused.remove()
    with pytest.raises(RuntimeError, match=r"remove\(\) or engine.destroy\(\) was called"):
        fused.backward(loss_of(model))
    loss_of(model).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert equal(model.parameters(), make().parameters())
    fuse(model)
    assert "takes over" not in caplog.text


@pytest.mark.parametrize("by_remove", [True, False])
@pytest.mark.parametrize(
    "begin, how",
    [
        (lambda fused, loss: loss.backward(), {"gradient_policy": "sharded"}),
        (lambda fused, loss: fused.measure_norm(loss), {"max_grad_norm": 0.1}),
        (lambda fused, loss: loss.backward(), {"bucket_size": 10**6}),
    ],
)
def test_a_step_in_progress_is_not_taken_over(begin, how, by_remove):
    model = make()
    older, optimizer = fuse(model, **how)
    begin(older, loss_of(model))
    before = weights(model)
    with pytest.raises(RuntimeError, match="in the middle of a step.*remove"):
        fuse(model)
    assert equal(model.parameters(), before)
    older.remove() if by_remove else optimizer.zero_grad()
    _, second = fuse(model)
    loss_of(model).backward()
    second.step()
    assert not equal(model.parameters(), before)


def test_two_optimizers_for_parts_of_one_model_are_refused():
    model = make()
    ds_ext.fuse_into_backward(model, ds_ext.LOMO(model[0].parameters(), lr=0.1))
    other = ds_ext.LOMO(model[2].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="one optimizer with parameter groups"):
        ds_ext.fuse_into_backward(model, other)


def test_models_may_share_frozen_layers(caplog):
    body = nn.Linear(6, 6).requires_grad_(False)
    models = [nn.Sequential(body, nn.Linear(6, 2)) for _ in range(2)]
    for model in models:
        optimizer = fuse(model)[1]
        before = weights(model[1])
        loss_of(model).backward()
        optimizer.step()
        assert not equal(weights(model[1]), before)
    assert "takes over" not in caplog.text
    body.requires_grad_(True)
    before = weights(body)
    loss_of(models[1]).backward()  # steps it as a part of this one
    assert not equal(weights(body), before)
    before = weights(models[0])
    with pytest.raises(RuntimeError, match=r"two engines or .* step 0\.weight"):
        loss_of(models[0])
    assert equal(weights(models[0]), before)


def test_the_older_of_two_models_that_share_a_layer_says_so():
    body = nn.Linear(6, 6)
    older, newer = (nn.Sequential(body, nn.Linear(6, 2)) for _ in range(2))
    first, second = fuse(older)[1], fuse(newer)[1]
    loss_of(newer).backward()
    second.step()
    loss_of(older).backward()
    with pytest.raises(RuntimeError, match="If the two models share layers, freeze"):
        first.step()


@pytest.mark.parametrize("policy", ["fused", "sharded"])
def test_a_bias_made_in_inference_mode_is_stepped_as_any_other(policy, monkeypatch):
    """Autograd saves no bias. With the reference executor torch itself refuses to update it."""
    paths.use(monkeypatch, "native")
    model, plain = make(), make()
    with torch.inference_mode():
        model[2].bias = nn.Parameter(model[2].bias.clone())
    optimizers = [fuse(m, gradient_policy=policy)[1] for m in (model, plain)]
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        loss_of(m).backward()
        optimizer.step()
    assert equal(model.parameters(), plain.parameters())
    assert not equal(model[2].parameters(), make()[2].parameters())


@pytest.mark.parametrize("how", [{}, {"max_grad_norm": 0.1}, {"gradient_policy": "sharded"}])
def test_copies_of_a_fused_model_are_ordinary_models_which_do_not_hold_it(how):
    model = make()
    fused, optimizer = fuse(model, **how)
    fused.backward(loss_of(model))
    optimizer.step()
    copies = [copy.deepcopy(model), from_file(model, weights_only=False)]
    for twin in [*copies, copy.deepcopy(copies[0])]:
        assert equal(twin.parameters(), model.parameters())
        before, count = weights(model), fused.buckets.uses.count.copy()
        loss_of(twin, 1).backward()
        assert all(p.grad is not None for p in twin.parameters())
        assert equal(model.parameters(), before) and fused.buckets.uses.count == count
        own = torch.optim.SGD(twin.parameters(), 0.1)
        own.step()
        assert not equal(twin.parameters(), before)
        new, its = fuse(twin)
        new.backward(loss_of(twin))
        its.step()
    fused.backward(loss_of(model, 2))
    optimizer.step()
    assert not equal(model.parameters(), before)
    left = [weakref.ref(p) for p in model.parameters()]
    del model, optimizer, fused
    gc.collect()
    assert [weight() for weight in left] == [None] * len(left)


def test_an_owner_that_the_garbage_collector_deletes_while_owners_are_listed_waits_for_nothing():
    """As an engine whose ``__del__`` removes its hooks."""

    class Owner:
        def __init__(self):
            self.itself = self

        def __del__(self):
            released.append(owners.release([], self))

    def listing():
        threshold = gc.get_threshold()
        for allocations in range(1, 30):  # the collector runs after so many: once amid the list
            gc.disable()
            owners.claim(torch.zeros(1), Owner(), "weight")
            gc.collect(0)
            owners.claim(torch.zeros(1), Owner(), "weight")
            gc.set_threshold(allocations)
            gc.enable()
            owners.all_owners()
            gc.set_threshold(*threshold)
        gc.collect()

    released = []
    thread = threading.Thread(target=listing, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and released
    assert not any(isinstance(owner, Owner) for owner in owners.all_owners())


STEPS, LR, CLIP = 15, 0.02, 0.05


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.middle, self.last = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 3)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        for _ in range(2):
            if self.way == "plain":
                h = torch.tanh(self.middle(h))
            else:
                h = checkpoint(self.middle, h, use_reentrant=self.way == "reentrant")
        return self.last(h).square().sum()


def own(seed, way):
    """A model with weights from a generator of its own: threads share torch's global one."""
    net, generator = Net(way), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.uniform_(-0.4, 0.4, generator=generator)
    return net


def batch(seed, step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * seed + step))


def train(seed, way, max_norm):
    """Trains a new model, which yields to other threads in each hook -> it."""
    model = own(seed, way)
    fused, optimizer = fuse(model, LR, bucket_size=20, max_grad_norm=max_norm)
    for p in model.parameters():
        p.register_hook(lambda grad: time.sleep(0))
    for step in range(STEPS):
        x = batch(seed, step).requires_grad_()
        fused.backward(model(x))
        optimizer.step()
        assert not fused.state.kept
    fused.remove()
    return model, x.grad


def reference(seed, way, max_norm):
    model = own(seed, way)
    for step in range(STEPS):
        x = batch(seed, step).requires_grad_()
        mean_step(torch.optim.SGD(model.parameters(), lr=LR), [model(x)], max_norm)
    return model, x.grad


class Evaluated(nn.Linear):
    """A layer that another thread evaluates while it trains."""

    def forward(self, x):
        if torch.is_grad_enabled():
            with ThreadPoolExecutor(1) as pool:
                pool.submit(torch.no_grad()(self), x).result()
        return super().forward(x)


def test_an_evaluation_by_another_thread_is_no_part_of_a_forward_pass():
    layer = Evaluated(3, 3)
    calls = ModuleCalls(layer, {})
    layer(torch.ones(2, 3))
    assert set(calls.count.values()) == {1} and not calls.in_segment


@pytest.mark.parametrize("max_norm", params([0.0, CLIP], [CLIP]))
def test_models_of_several_threads_do_not_see_each_other(max_norm):
    ways = ["plain", "reentrant", "nonreentrant", "plain"]
    found, errors = {}, []

    def run(seed):
        try:
            for _ in range(2):  # begins while others are in backward
                found[seed] = train(seed, ways[seed], max_norm)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(len(ways))]
    # torch 2.13's Generator.get_state, which checkpointing calls, allocates a Python object under
    # the generator's lock. If this starts a garbage collection that frees a tensor, the thread
    # releases the GIL, and a second thread in get_state then waits for the lock with the GIL.
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    finally:
        gc.enable()
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    for seed, (model, grad) in found.items():
        plain, wanted = reference(seed, ways[seed], max_norm)
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-6)
        for p, q, start in zip(
            model.parameters(), plain.parameters(), own(seed, "plain").parameters(), strict=True
        ):
            assert (p - q).norm() <= 1e-4 * (q - start).norm()


def test_a_model_is_owned_when_its_owner_is_complete():
    """Another thread's backward pass asks all owners whether it reaches their parameters."""
    attach, seen = Buckets.attach, []

    def looking(self, *args):
        attach(self, *args)
        for each in owners.all_owners():
            seen.append((each.uses, each.unfinished()))

    model = make()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Buckets, "attach", looking)
        fused, _ = fuse(model)
    assert seen
    fused.remove()
