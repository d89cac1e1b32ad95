"""Random sequences of a user's calls beside a reference in one process: see tests/scenarios."""

import functools
import warnings
from itertools import product

import pytest

from tests.common.choose import pairs, params
from tests.scenarios import driver, search
from tests.scenarios.calls import CALLS
from tests.scenarios.ways import WAYS

QUICK = 8  # sequences of a way in one process
MANY = 30  # the same ones on every machine, so that a failure can be repeated
SECONDS = 30.0  # for each way: a slow machine tries fewer
LEAST = 5


@pytest.mark.parametrize("way", ["plain", "fused"])
def test_the_first_sequences(way):
    found = search.search(way, 1800, count=QUICK)
    assert not found.findings, found.findings[0]
    assert found.sequences == QUICK


SOME = [("engine", 2, "fused", "none"), ("engine", 3, "sharded", "exact")]
SOME += [("fsdp2", "fsdp2", "fused", "exact"), ("replicas", None, "fused", "value")]
POLICIES = "fused", "sharded"
PLACES = [*(("engine", n) for n in range(4)), ("fsdp2", "fsdp2"), ("replicas", None)]
TABLE = [(*p, *how) for p in PLACES for how in product(POLICIES, ("exact", "none", "value"))]
# The random sequences draw the other combinations.
EVERY = pairs(TABLE, lambda case: case[1:], SOME)
PLAIN = "steps", "one_step"
FEATURES = ["freezing and unfreezing layers", "hyper-parameters per parameter group"]


@pytest.mark.supports(
    lambda way: FEATURES if way == "engine" else [], stage="stage", optimizer="AdaLomo"
)
@pytest.mark.parametrize("way, stage, policy, clip", params(EVERY, [SOME[0], SOME[-1]]))
def test_every_call_is_right_at_every_stage(way, stage, policy, clip):
    """Each is followed by a step, which shows what it has left behind."""
    setup, _ = driver.made(way, 3)
    setup |= {"kind": "AdaLomo", "policy": policy, "clip": clip, "max": 0.05, "bucket": 60}
    setup |= {"accumulation": 1 if policy == "fused" else 2, "stage": stage}
    names = [name for name, call in CALLS.items() if way in call.ways and name not in PLAIN]
    calls = [call for i, name in enumerate(names) for call in ((name, i), ("one_step", i))]
    done, wrong, refusals = search.on(way, driver.play, (setup, calls), limit=300)
    assert not wrong, (calls[done - 1], wrong)
    refused = {text.split(":")[0] for text in refusals}
    assert refused <= {name for name in names if CALLS[name].is_refusable}


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS])
def test_as_many_sequences_as_there_is_time_for(way):
    found = search.search(way, SECONDS, first=10**6, count=MANY)
    if found.findings and search.NOT_ALONE in found.findings[0]:
        # Everything that a sequence draws is fixed, so an error comes again in the same processes.
        warnings.warn(found.findings[0], stacklevel=1)
        found = search.search(way, SECONDS, first=10**6, count=MANY)
    assert not found.findings, found.findings[0]
    assert found.sequences >= LEAST


def test_a_difference_is_found_and_made_short(monkeypatch):
    def of_torch_alone(pair, draw):
        pair.reference.optimizer.param_groups[0]["lr"] *= 2

    changed = CALLS["hyper_parameters"]._replace(make=of_torch_alone)
    monkeypatch.setitem(CALLS, "hyper_parameters", changed)

    def fails(sequence):
        return bool(driver.play("plain", sequence)[1])

    sequence = next(x for x in map(functools.partial(driver.made, "plain"), range(50)) if fails(x))
    _, calls = driver.shortest(sequence, fails)
    assert len(calls) == 2 and calls[0][0] == "hyper_parameters"
