"""The tensors in which gradients wait to be reduced: one for the small ones of a bucket."""

import pytest
import torch
from torch import nn

from ds_ext.backward.packing import ALIGNMENT, Packing
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import Placement

RANKS, SIZE = 3, 100
SHAPES = [(4, 5), (7,), (2,), (6, 9)]  # the last is large: more than half a bucket


class Cut(Placement):
    """The placement of one of several ranks that do not exist."""

    num_shards = RANKS


def made(dtype=None):
    """Parameters by their shapes, and the memory of their gradients."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    cut = Cut(None)
    layout = Layout(None, {p: str(i) for i, p in enumerate(params)}, lambda p: cut)
    return params, Packing(layout, SIZE, lambda p: dtype)


def sent(packing, grads, votes=0):
    """The messages of a bucket, and each gradient as the ranks receive it, without padding."""
    kept = {p: None if g is None else packing.keep(p, g, None) for p, g in grads.items()}
    messages = packing.messages(kept, votes)
    assert all(message.memory.is_contiguous() for message in messages)
    where = {p: message for message in messages for p in message.columns}
    assert where.keys() == grads.keys()
    return messages, {p: where[p].grad(p).reshape(-1) for p in grads}


def check(found, grads, dtype=torch.float32):
    """Compares gradients as sent with those given, whose padding is zero."""
    for p, g in grads.items():
        expected = torch.zeros(-(-p.numel() // RANKS) * RANKS, dtype=dtype)
        if g is not None:
            expected[: p.numel()] = g.reshape(-1)
        assert torch.equal(found[p], expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_small_gradients_share_a_message_from_the_second_pass_on(dtype):
    params, packing = made(dtype)
    for expected in (4, 2, 2):
        grads = {p: torch.randn(p.shape[::-1]).permute(*range(p.ndim)[::-1]) for p in params}
        messages, found = sent(packing, grads)
        assert len(messages) == expected
        check(found, grads, dtype or torch.float32)
        starts = [c.start * m.memory.itemsize for m in messages for c in m.columns.values()]
        assert all(start % ALIGNMENT == 0 for start in starts)
    shared = max(messages, key=lambda message: len(message.columns))
    assert set(shared.columns) == set(params[:3])


def test_parts_of_a_gradient_add_up_where_they_are_packed():
    params, packing = made()
    for _ in range(2):
        parts = [torch.randn_like(params[0]) for _ in range(2)]
        kept = None
        for part in parts:
            kept = packing.keep(params[0], part.clone(), kept)
        other = packing.keep(params[1], torch.ones_like(params[1]), None)
        messages = packing.messages({params[0]: kept, params[1]: other}, 0)
        found = next(m for m in messages if params[0] in m.columns).grad(params[0])
        assert torch.equal(found.reshape(-1)[:20], sum(parts).view(-1))
    assert len(messages) == 1


def test_a_gradient_that_a_rank_lacks_is_zero_in_its_place():
    params, packing = made()
    for lacking in (None, 1, 0):
        grads = {p: None if i == lacking else torch.randn_like(p) for i, p in enumerate(params)}
        messages, found = sent(packing, grads)
        check(found, grads)
    assert len(messages) == 2


def test_a_bucket_of_other_parameters_is_laid_out_anew():
    params, packing = made()
    counts = []
    for some in (params[:3], params[:2], params[:2], params[:3], params[:3]):
        grads = {p: torch.randn_like(p) for p in some}
        messages, found = sent(packing, grads)
        check(found, grads)
        counts.append(len(messages))
    assert counts == [3, 2, 1, 2, 1]


def test_a_discarded_gradient_leaves_nothing_behind():
    params, packing = made()
    grads = {p: torch.randn_like(p) for p in params}
    sent(packing, grads)
    packing.keep(params[0], grads[params[0]], None)
    packing.clear()
    assert all(pack.memory is None for pack in packing.packs.values())
    _, found = sent(packing, grads | {params[0]: None})
    check(found, grads | {params[0]: None})


def test_votes_have_columns_of_their_own():
    params, packing = made()
    grads = {p: torch.randn_like(p) for p in params[:2]}
    sent(packing, grads, votes=2)
    (message,), found = sent(packing, grads, votes=2)
    votes = torch.tensor([1.0, 2.0**20])
    assert message.takes_votes(votes) and not message.takes_votes(torch.ones(9))
    assert torch.equal(message.votes(message.memory, 2), votes.expand(RANKS, 2))
    check(found, grads)
