"""Threads that each train a model of their own see nothing of each other."""

import gc
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_ext

STEPS = 15
LR = 0.02
CLIP = 0.05


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


def make(seed, way):
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
    model = make(seed, way)
    optimizer = ds_ext.LOMO(model.parameters(), lr=LR)
    fused = ds_ext.fuse_into_backward(model, optimizer, bucket_size=20, max_grad_norm=max_norm)
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
    model = make(seed, way)
    for step in range(STEPS):
        model.zero_grad()
        x = batch(seed, step).requires_grad_()
        model(x).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf)
        torch.optim.SGD(model.parameters(), lr=LR).step()
    return model, x.grad


@pytest.mark.parametrize("max_norm", [0.0, CLIP])
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
            model.parameters(), plain.parameters(), make(seed, "plain").parameters(), strict=True
        ):
            assert (p - q).norm() <= 1e-4 * (q - start).norm()


def test_a_model_is_owned_when_its_owner_is_complete():
    """Another thread's backward pass asks all owners whether it reaches their parameters."""
    from ds_ext.backward import owners
    from ds_ext.backward.buckets import Buckets

    attach, seen = Buckets.attach, []

    def looking(self, *args):
        attach(self, *args)
        for each in owners.all_owners():
            seen.append((each.uses, each.unfinished()))

    model = make(0, "plain")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Buckets, "attach", looking)
        fused = ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters(), lr=0.1))
    assert seen
    fused.remove()
