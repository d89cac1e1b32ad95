"""The session on a GPU: its order, its result files, its stages at a tiny size on the CPU."""

import json
import subprocess
import sys
import types

import pytest
import torch

from benchmarks.gpu import __main__ as child
from benchmarks.gpu import (
    kernel_tests,
    launch_order,
    ranks,
    selftest,
    session,
    setting,
    timing,
    training_speed,
    zero3,
)
from benchmarks.gpu.session import FAILED, PASSED, SKIPPED, STAGES, Runner, Stage
from tests import worlds
from tests.common import needs

ON = setting.REHEARSAL

# The runner. Stages are processes; here, Python code by its name.
CODE = {"good": 'note("row", ["Numbers", {"x": 1}])', "skips": 'note("skipped", "no second GPU")'}
CODE |= {"wrong": 'note("failed", "ValueError: why\\nmore"); exit(1)'}
CODE |= {"dies": 'note("row", ["Numbers", {"x": 3}]); os.kill(os.getpid(), 11)'}
CODE |= {"hangs": 'subprocess.Popen(["sleep", "60"]); print("begun", flush=True); time.sleep(60)'}
HEAD = """
import json, os, subprocess, sys, time
def note(kind, what):
    open(sys.argv[1], "a").write(json.dumps([kind, what]) + chr(10))
"""


@pytest.fixture
def stages(monkeypatch):
    """Stages whose processes run ``CODE``; returns the names of those that were begun."""
    begun, start = [], subprocess.Popen

    def popen(command, **how):
        if "benchmarks.gpu" not in command:
            return start(command, **how)
        name, path = command[3:5]
        begun.append(name)
        return start([sys.executable, "-S", "-c", HEAD + CODE[name], path], **how)

    monkeypatch.setattr(session.subprocess, "Popen", popen)
    return begun


def runner(folder, **how):
    made = tuple(Stage(name, f"It {name}.", 2 if name == "hangs" else 60) for name in CODE)
    return Runner(True, folder, stages=made, **how)


def test_a_failure_stops_no_other_stage_and_is_shown_with_its_first_line(stages, tmp_path, capsys):
    assert not runner(tmp_path).run(CODE)
    assert stages == [*CODE]
    table = capsys.readouterr().out.split("| stage |")[1]
    found = {}
    for line in table.splitlines()[2:]:
        name, result, _, why = (cell.strip() for cell in line.strip("|").split("|"))
        found[name] = result, why
    assert found["good"] == (PASSED, "")
    assert found["skips"] == (SKIPPED, "no second GPU")
    assert found["wrong"] == (FAILED, "ValueError: why")
    assert found["dies"] == (FAILED, "its process ended with status -11 and no message")
    assert found["hangs"] == (FAILED, "it took longer than 2 s")


def test_rows_are_kept_and_finished_stages_are_not_repeated(stages, tmp_path):
    assert not runner(tmp_path).run(["good", "skips", "dies"])
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["gpu_dies", "gpu_good"]
    assert "| x |\n| --- |\n| 3 |" in (tmp_path / "gpu_dies").with_suffix(".md").read_text()
    stages.clear()
    runner(tmp_path).run(["good", "skips", "dies"])
    assert stages == ["skips", "dies"]  # what has not passed is tried again
    stages.clear()
    assert runner(tmp_path, is_fresh=True).run(["good"])
    assert stages == ["good"]


def test_all_stages_exist_and_take_20_minutes_at_most():
    assert sum(stage.limit for stage in STAGES) <= 20 * 60
    assert max(stage.limit for stage in STAGES) < 10 * 60
    for stage in STAGES:
        assert callable(child.importlib.import_module(f"benchmarks.gpu.{stage.name}").rows)
    names = ["selftest", "kernel_tests", "launch_order", "training_memory", "planned_memory"]
    assert [stage.name for stage in STAGES][:5] == names  # right before fast


def noted(tmp_path, rows, monkeypatch):
    stage = types.SimpleNamespace(rows=rows)
    monkeypatch.setattr(child.importlib, "import_module", lambda name: stage)
    path, failed = tmp_path / "rows", False
    try:
        child.main("any", str(path), True)
    except SystemExit:
        failed = True
    return [json.loads(line) for line in path.read_text().splitlines()], failed


def test_a_process_notes_rows_then_its_error_or_its_reason(tmp_path, monkeypatch):
    def fails(on):
        yield "Numbers", {"x": 1.5}
        raise ValueError("first\nsecond")

    def skips(on):
        raise setting.Skip("one GPU here")
        yield

    def wrong(on):
        yield "Numbers", {"x": 1, "verdict": f"{setting.WRONG}: weights"}

    found, failed = noted(tmp_path, fails, monkeypatch)
    assert found == [["row", ["Numbers", {"x": 1.5}]], ["failed", "ValueError: first\nsecond"]]
    assert failed
    (tmp_path / "rows").unlink()
    assert noted(tmp_path, skips, monkeypatch) == ([["skipped", "one GPU here"]], False)
    (tmp_path / "rows").unlink()
    found, failed = noted(tmp_path, wrong, monkeypatch)
    assert failed and found[-1][0] == "failed"


def rehearsed(stage, on=ON):
    with setting.using_kernels(on.trains_by):
        return [row for _, row in stage.rows(on)]


@pytest.mark.slow
def test_the_first_stage_is_the_self_test():
    found = rehearsed(selftest)
    assert {row["verdict"] for row in found} == {"right"} and len(found) == 2 * 12


@pytest.mark.slow
def test_tests_of_kernels_run_in_a_process():
    (row,) = rehearsed(kernel_tests)
    assert row["verdict"] == "right" and row["passed"] == 4
    failing = kernel_tests.pytest(
        "none", ["tests/unit/test_statistics.py", "-k", "nothing_has_this_name"]
    )
    assert failing["verdict"] == "WRONG" and failing["passed"] == 0
    paths = kernel_tests.tests(kernel_tests.FILES)
    assert all((kernel_tests.ROOT / path).exists() for path in paths)


@needs.triton
def test_launch_order_compares_bits(monkeypatch):
    (row,) = rehearsed(launch_order)
    assert row["verdict"] == "right" and row["again"] and row["blocking"]
    assert torch.get_default_dtype() == torch.float32
    digests = iter(range(9))
    monkeypatch.setattr(launch_order, "trained", lambda *_: (str(next(digests)), 1.0))
    (row,) = rehearsed(launch_order)
    assert row["verdict"] == "WRONG"


@needs.triton
def test_passes_are_timed_beside_a_copy_and_adamw():
    rows = rehearsed(timing)
    assert [row["step"] for row in rows] == ["copy_", timing.ADAMW, "LOMO"] * 2
    assert all(row["ms"] > 0 and row["ms / copy_"] > 0 for row in rows)


@pytest.mark.slow
def test_optimizers_take_turns_with_one_model():
    rows = rehearsed(training_speed)
    assert [row["optimizer"] for row in rows] == [*training_speed.NAMES] * 2
    assert {row["verdict"] for row in rows} == {"right"}
    ratios = {row["optimizer"]: row["time / none"] for row in rows[:5]}
    assert ratios["none"] == 1 < ratios["AdaLomo"]
    model, tokens = training_speed.checkpointed(ON.small, ON), torch.ones(1, 8, dtype=torch.long)
    for name in ("none", "AdaLomo"):
        by = training_speed.optimizer_of(model, name)
        with training_speed.stepped(model, name, by, tokens) as step:
            step()
        assert all(p.grad is None for p in model.parameters())
    model(tokens, labels=tokens).loss.backward()  # nobody takes the gradients any more
    assert all(p.grad is not None for p in model.parameters())


@needs.triton
def test_one_rank_calls_collectives_and_equals_a_plain_step():
    rows = rehearsed(ranks)
    assert [row["way"] for row in rows] == [*ranks.WAYS]
    assert {row["verdict"] for row in rows} == {"right"}
    assert all(row["rounds"] > 0 for row in rows) and rows[0]["sums of gradients"] > 1


@worlds.on(2)
def test_two_ranks_equal_one_process_on_the_batches_of_both():
    rows = ranks.on_rank(torch.distributed.get_rank(), 2, ON)
    assert {row["verdict"] for row in rows} == {"right"}, rows


@worlds.on(1)
def test_deepspeed_equals_a_plain_step():
    rows = rehearsed(zero3)
    assert [row["optimizer"] for row in rows] == ["AdaLomo"]
    assert {row["verdict"] for row in rows} == {"right"}, rows
