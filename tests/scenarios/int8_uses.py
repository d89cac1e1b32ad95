"""Random uses of a model whose weights are stored in 8 bits, beside the same model without them."""

import copy
import io
import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ds_ext
from ds_ext.ops import int8
from tests.common.int8_model import STORED, batch, made

LONGEST = 8


class Twin:
    """A stored model that AdaLomo steps inside backward."""

    def __init__(self) -> None:
        self.model = made()
        ds_ext.store_int8(self.model)
        self.optimizer = ds_ext.AdaLomo(self.model.parameters(), lr=1e-2)
        self.fused = ds_ext.fuse_into_backward(self.model, self.optimizer)
        self.steps = 0

    def params(self) -> list[Tensor]:
        return [self.model.get_parameter(name) for name in STORED]

    def train(self) -> None:
        self.fused.backward(self.model(batch(self.steps)))
        self.optimizer.step()
        self.steps += 1

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        return self.model(batch(99))

    def codes(self) -> list[Tensor]:
        found = [int8.find(p) for p in self.params()]
        return [held.stored.clone() for held in found]


Use = Callable[[Twin, Twin, random.Random], Any]  # of the first; the second is the reference


def train(one: Twin, other: Twin, draw: random.Random) -> None:
    one.train()
    other.train()


def train_expanded(one: Twin, other: Twin, draw: random.Random) -> None:
    with ds_ext.expand_int8(draw.sample(one.params(), draw.choice([1, 3]))):
        one.train()
    other.train()


def evaluate(one: Twin, other: Twin, draw: random.Random) -> None:
    assert one.evaluate().equal(other.evaluate())


def evaluate_expanded(one: Twin, other: Twin, draw: random.Random) -> None:
    with ds_ext.expand_int8(one.params()):
        assert one.evaluate().equal(other.evaluate())
        assert all(p.isfinite().all() for p in one.params())


def evaluate_in_a_thread(one: Twin, other: Twin, draw: random.Random) -> None:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(one.evaluate()))
    thread.start()
    expected = one.evaluate()
    thread.join()
    assert found and found[0].equal(expected)


def edit(one: Twin, other: Twin, draw: random.Random) -> None:
    """In a context that also saves, and by loading."""
    name, factor = draw.choice(STORED), draw.choice([0.0, 0.5, 1.5])
    with ds_ext.expand_int8(one.params()), torch.no_grad():
        one.model.get_parameter(name).mul_(factor)
        saved = one.model.state_dict()
    state = other.model.state_dict()
    shared = ("embed.weight", "head.weight")
    for key in shared if name in shared else (name,):
        state[key] = state[key] * factor
    other.model.load_state_dict(state)
    assert saved[name].equal(other.model.state_dict()[name])


def copied(one: Twin, other: Twin, draw: random.Random) -> None:
    model = copy.deepcopy(one.model)
    with torch.no_grad():
        assert model(batch(99)).equal(other.evaluate())


def pickled(one: Twin, other: Twin, draw: random.Random) -> None:
    file = io.BytesIO()
    torch.save(one.model, file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    with torch.no_grad():
        assert model(batch(99)).equal(other.evaluate())


def reloaded(one: Twin, other: Twin, draw: random.Random) -> None:
    one.model.load_state_dict(copy.deepcopy(one.model.state_dict()))


def written_outside(one: Twin, other: Twin, draw: random.Random) -> None:
    p = draw.choice(one.params())
    act = draw.choice([Tensor.zero_, nn.init.zeros_, Tensor.sum, lambda p: p + 1, Tensor.clone])
    with torch.no_grad():
        act(p)
    raise AssertionError("a weight without values was read or written in silence")


USES: list[Use] = [train, train_expanded, evaluate, evaluate_expanded, evaluate_in_a_thread, edit]
USES += [copied, pickled, reloaded, written_outside]


def play(seed: int) -> None:
    """A random sequence of uses; a ValueError or RuntimeError is a refusal, and changes nothing."""
    draw = random.Random(seed)
    one, other = Twin(), Twin()
    for use in draw.choices(USES, k=LONGEST):
        before = one.codes()
        try:
            use(one, other, draw)
        except (ValueError, RuntimeError) as error:
            assert " " in str(error), f"{use.__name__}: {error!r}"
            assert all(map(torch.equal, one.codes(), before)), f"{use.__name__} changed codes"
            assert use in (copied, pickled, written_outside), f"{use.__name__} refused: {error}"
        pairs = zip(one.codes(), other.codes(), strict=True)
        assert all(a.equal(b) for a, b in pairs), f"codes differ after {use.__name__}"
