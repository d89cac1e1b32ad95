"""Live bytes are counted from allocation to release. A float takes 4 bytes."""

import torch

from ds_ext.planner.live_memory import LiveMemory


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


def test_a_storage_that_grows_counts_as_it_is():
    with LiveMemory([]) as watch:
        x = torch.ones(100)
        x.resize_(300)
        assert watch.now == 1200


def test_backward_is_watched():
    w, c = torch.ones(1000, requires_grad=True), torch.ones(1000)
    with LiveMemory([w, c]) as watch:
        loss = (w * c).sum()  # the product is freed: nothing saves it
        assert (watch.now, watch.most) == (8004, 12004)
        loss.backward()  # the gradient of the loss, and the product that becomes that of w
        assert (watch.now, watch.most) == (12004, 12008)
        w.grad = None
        assert watch.now == 8004
