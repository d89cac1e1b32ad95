"""Random sequences of a user's calls beside a reference in one process: see tests/scenarios."""

import functools

import pytest

from tests.scenarios import driver, search
from tests.scenarios.calls import CALLS

COUNTS = {
    "quick": {"plain": 30, "fused": 30},
    "slow": {"plain": 100, "fused": 150, "fsdp2": 40, "engine": 40},
}
CASES = [
    pytest.param(way, count, marks=[pytest.mark.slow] * (kind == "slow"), id=f"{kind}-{way}")
    for kind, counts in COUNTS.items()
    for way, count in counts.items()
]


@pytest.mark.parametrize("way, count", CASES)
def test_sequences(way, count):
    found = search.search(way, 1800, first=0 if count <= 30 else 10**6, count=count)
    assert not found.findings, found.findings[0]
    assert found.sequences == count


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
