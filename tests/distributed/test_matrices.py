"""APOLLO and Muon on real ranks against their authors' code in one process, and resumed."""

import pytest
import torch

from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rules import named
from ds_ext.rules.base import key_of
from tests import worlds
from tests.common import low_rank, models
from tests.common.choose import params
from tests.common.updates import check, error
from tests.distributed import matrices
from tests.distributed.matrices import STEPS, TYPES

STAGES = (None, 0, 1, 2, 3)
CASES = [(name, ranks, stage) for name in TYPES for ranks in (2, 3) for stage in STAGES]
QUICK = {("APOLLO", 2, 3), ("APOLLO", 2, 2), ("APOLLO-Mini", 2, 3), ("APOLLO-Mini", 3, 1)}
QUICK |= {("ds_ext.Muon", 2, 3), ("ds_ext.Muon", 2, 2), ("ds_ext.Muon", 2, None)}
# What Muon's iteration in fp32 may be off: test_muon.py.
CLOSE = {"APOLLO": 1e-5, "APOLLO-Mini": 1e-5, "ds_ext.Muon": 1e-3}
STEPPED = {"up.weight", "down.weight", "shared.weight", "odd.weight"}
LINEAR = STEPPED | {"unused.weight", "frozen.weight"}


def by_authors(name, got, model):
    """The authors' optimizer of the matrices, and torch's AdamW of the rest."""
    named_parameters = {n: p for n, p in model.named_parameters() if n in got["groups"]}
    made = []
    for n, p in named_parameters.items():
        kind, lr, decay = got["groups"][n]
        if kind == "AdamW":
            made.append(torch.optim.AdamW([p], lr=lr, weight_decay=decay))
        elif name == "ds_ext.Muon":
            made.append(torch.optim.Muon([p], lr=lr, weight_decay=decay))
        else:
            rule = OPTIMIZERS[named(name).rule.__name__.lower()].hypers(**TYPES[name])
            own = {"rank": rule.rank, "scale": rule.scale, "scale_type": rule.scale_type}
            stream = {p: got["streams"].get(n, 0)}
            made.append(low_rank.APOLLO(stream, gap=3, lr=lr, weight_decay=decay, **own))
    return made


def train_by_authors(name, got, model, ranks, steps):
    """Trains a whole model by the mean loss over all ranks, with the groups that ``got`` tells."""
    optimizers = by_authors(name, got, model)
    with low_rank.in_dtype(torch.float64):
        for step in range(steps):
            losses = [model(batch, step) for batch in models.batch(step, ranks)]
            torch.stack(losses).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.supports(
    "fp32, each optimizer against its authors' code",
    stage="stage",
    optimizer=lambda name: key_of(name),
)
@pytest.mark.parametrize("name, ranks, stage", params(CASES, QUICK))
def test_equals_the_authors(name, ranks, stage):
    got = worlds.run(ranks, matrices.train, name, stage)[0]
    assert got["identical"]
    # An engine has groups of frozen parameters too, which may be unfrozen.
    linear = LINEAR - {"frozen.weight"} if stage is None else LINEAR
    assert {n for n, (kind, *_) in got["groups"].items() if kind is None} == linear
    assert {kind for kind, *_ in got["groups"].values()} == {None, "AdamW"}
    if "APOLLO" in name:
        assert got["streams"].keys() == STEPPED and len(set(got["streams"].values())) == 4
    model = models.make()
    train_by_authors(name, got, model, ranks, STEPS)
    check(got["after"], dict(model.named_parameters()), got["before"], STEPS, CLOSE[name])


ELSEWHERE = [(name, stage) for name in TYPES for stage in range(4)]


@pytest.mark.supports(
    "resume on other ranks and another stage", stage="stage", optimizer=lambda name: key_of(name)
)
@pytest.mark.parametrize(
    "name, stage", params(ELSEWHERE, [("APOLLO", 2), ("APOLLO-Mini", 0), ("ds_ext.Muon", 2)])
)
def test_a_run_goes_on_on_other_ranks_and_another_stage(name, stage, tmp_path):
    """2 -> 3 -> 1 ranks, against 2 that are not broken off; a projection is kept across both."""
    one, two = str(tmp_path / "whole"), str(tmp_path / "broken")
    whole = worlds.run(2, matrices.resume, name, stage, one, 0, 6)[0]
    worlds.run(2, matrices.resume, name, stage, two, 0, 2)
    worlds.run(3, matrices.resume, name, (stage + 1) % 4, two, 2, 5)
    (last,) = worlds.run(1, matrices.resume, name, (stage + 3) % 4, two, 5, 6)
    assert error(last["after"], whole["after"], whole["before"]) <= CLOSE[name] / 10


@pytest.mark.parametrize("name", params(TYPES, ["APOLLO"]))
def test_bf16_weights_are_clipped_and_accumulated_alike_at_every_stage(name):
    """At stage 3 as at stage 0, where no rank has a part: with 24 bits, and rounded at random."""
    for weight_update in ("master24", "stochastic"):
        runs = [worlds.run(2, matrices.accumulate, name, at, weight_update)[0] for at in (0, 3)]
        alone, cut = runs
        assert alone["identical"] and cut["identical"]
        assert error(cut["after"], alone["after"], alone["before"]) <= 0.05
