"""Hugging Face's mixtures of experts on 2 and 4 ranks against one process, experts apart there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import authors, experts
from tests.experts import RUNS, STEPS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def got(tmp_path_factory):
    if ready := os.environ.get("DS_EXT_READY"):
        return torch.load(ready, weights_only=False)
    out = tmp_path_factory.mktemp("experts") / "results.pt"
    done = subprocess.run(
        [sys.executable, "-m", "tests.experts", str(out)],
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize("name", RUNS)
def test_equals_one_process_whose_experts_are_parameters_of_their_own(got, name):
    ran = got[name]
    model, idle = experts.reference(RUNS[name], authors.ordinary)
    square, square_error = 0.0, 0.0
    for n, p in model.named_parameters():
        p, before, after = p.detach(), ran["before"][n], ran["after"][n]
        if n not in ran["kept"]:
            p, before, after = p[None], before[None], after[None]
        for a, b, c in zip(after, p, before, strict=True):  # by expert
            error, update = (a - b).norm(), (b - c).norm()
            assert error <= max(1e-5 * update, STEPS * 2**-24 * b.norm()), n
            square, square_error = square + update**2, square_error + error**2
    assert square_error**0.5 <= 1e-5 * square**0.5
    assert ran["drift"] == 0.0
    # The routing is what it is for: experts that are idle on one rank, on another, and on all.
    some = idle.any(1) & ~idle.all(1)
    assert some.any() and idle.all(1).any() and not idle[0].any()


@pytest.mark.parametrize("name", RUNS)
def test_each_expert_has_its_own_state(got, name):
    kept = got[name]["kept"]
    assert len(kept) == (8 if RUNS[name].kind == "gpt-oss" else 4)
    assert all(experts == ["0", "1", "2", "3"] for experts in kept.values())
