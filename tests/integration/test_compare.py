"""`make compare` and `benchmarks trends`, in short form on tiny models."""

import json
import re
import runpy
import sys
import threading
import types

import pytest

from tests.common import apart
from tests.integration.test_examples import EXAMPLES


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield __import__("turns")
    del sys.modules["turns"]


def test_two_runs_of_two_ranks_take_their_steps_in_turns(turns):
    store, log, steps = turns.serve(), [], 3

    def train(run, rank):
        own = turns.Turns(f"{store.port},{run}")
        args = types.SimpleNamespace(world_size=2, process_index=rank)
        for step in range(steps):
            own.on_step_begin(args, types.SimpleNamespace(global_step=step), None)
            log.append((step, run))
        own.on_train_end(args, types.SimpleNamespace(global_step=steps), None)

    threads = [threading.Thread(target=train, args=(i % 2, i // 2)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    # Both ranks of a run take a step, then both of the other.
    assert log == sorted(log) and len(log) == 4 * steps


@pytest.mark.slow
def test_compare_measures_adamw_and_adalomo_on_the_same_batches(tmp_path):
    model = tmp_path / "tiny-llama"
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "tiny.py"))["make"](model)
    sys.path.remove(str(EXAMPLES))
    options = ["--ranks=1", "--steps=6", "--evaluations=2", "--dtype=fp32", "--max-length=32"]
    rates = ["--lr=1e-2", "--adamw-lr=1e-2"]
    script = str(EXAMPLES / "compare.py")
    apart.python(script, f"--model={model}", f"--out={tmp_path}", *options, *rates)
    adamw, adalomo = json.loads((tmp_path / "compare.json").read_text())["runs"]
    assert [adamw["optimizer"], adalomo["optimizer"]] == ["AdamW", "AdaLomo"]
    for run in (adamw, adalomo):
        assert len(run["seconds"]) == len(run["train_loss"]) == 6 and min(run["seconds"]) > 0
        assert [step for step, _ in run["held_out_loss"]] == [0, 3, 6]
        assert run["held_out_loss"][-1][1] < run["held_out_loss"][0][1] - 0.05
        assert run["peak"] > sum(run["live"].values()) and min(run["live"].values()) > 0
    # The first loss comes before any update: the same batch, the same weights.
    assert adamw["train_loss"][0] == pytest.approx(adalomo["train_loss"][0], rel=1e-5)
    assert adamw["held_out_loss"][0] == pytest.approx(adalomo["held_out_loss"][0], rel=1e-5)
    n = adamw["live"]["weights"] / 4
    assert n == adalomo["live"]["weights"] / 4 > 10**6
    kept = [run["live"]["optimizer state, buffers"] for run in (adamw, adalomo)]
    assert kept[0] - kept[1] > 16 * n  # two moments, an fp32 copy and the gradients
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_trends_are_measured(tmp_path):
    apart.python("-m", "benchmarks", "trends", "--quick", "--out", str(tmp_path))
    for name in ("parameters", "ranks", "buckets"):
        rows = [x for x in (tmp_path / f"trends_{name}.md").read_text().splitlines() if "|" in x]
        assert len(rows) > 3 and any(re.search(r"\| \d+\.\d+", row) for row in rows)
