"""The session on a GPU: its order, its result files, its stages at a tiny size on the CPU."""

import dataclasses
import json
import os
import subprocess
import sys
import types

import pytest
import torch

import benchmarks.gpu
from benchmarks.gpu import __main__ as child
from benchmarks.gpu import (
    checks,
    compiling,
    deepspeed_one_rank,
    kernel_tests,
    launch_order,
    one_rank,
    profile,
    session,
    setting,
    timing,
    training_memory,
    two_ranks,
    wheels,
)
from benchmarks.gpu.session import FAILED, LEFT, PASSED, SKIPPED, STAGES, Runner, Stage
from ds_ext.ops.executors.triton import devices
from tests import worlds
from tests.common import needs

ON = setting.REHEARSAL

# The runner. Stages are processes; here, Python code by its name.

CODE = {
    "good": 'note("row", ["Numbers", {"x": 1}])',
    "skips": 'note("skipped", "no second GPU")',
    "wrong": 'note("failed", "ValueError: why\\nmore"); exit(1)',
    "dies": 'note("row", ["Numbers", {"x": 3}]); os.kill(os.getpid(), 11)',
    "hangs": 'subprocess.Popen(["sleep", "60"]); print("begun", flush=True); time.sleep(60)',
}
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


def test_no_stage_is_begun_that_may_outlast_the_time(stages, tmp_path, capsys):
    assert runner(tmp_path, minutes=0.5).run(["good", "hangs"]) is False
    assert stages == ["hangs"]
    assert f"| good | {LEFT} |" in capsys.readouterr().out


def test_a_cache_is_filled_again_if_a_stage_needs_it(stages, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(CODE, "fills", "pass")
    made = (Stage("fills", "", 60, is_kept=False), Stage("good", "", 60))
    for names, expected in (
        (["fills", "good"], ["fills", "good"]),
        (["fills", "good"], []),
        (["fills"], ["fills"]),
    ):
        stages.clear()
        assert Runner(True, tmp_path, stages=made).run(names)
        assert stages == expected
    (tmp_path / "gpu_good").with_suffix(".md").unlink()
    stages.clear()
    assert Runner(True, tmp_path, stages=made).run(["fills", "good"])
    assert stages == ["fills", "good"]


def test_all_stages_exist_and_take_25_minutes_at_most():
    assert sum(stage.limit for stage in STAGES) <= 25 * 60
    assert max(stage.limit for stage in STAGES) < 10 * 60
    for stage in STAGES:
        assert callable(child.importlib.import_module(f"benchmarks.gpu.{stage.name}").rows)
    kept = [stage.name for stage in STAGES if stage.is_kept]
    assert [*map(str, kept)][:2] == ["kernel_tests", "checks"]  # right before fast
    assert STAGES[0].name == "compiling"


def test_the_command_lists_stages_and_wheels(capsys, monkeypatch):
    parser = benchmarks.gpu.argparse.ArgumentParser()
    benchmarks.gpu.add_arguments(parser)
    given = []
    monkeypatch.setattr(session.Runner, "run", lambda self, names: given.append(names) or True)
    benchmarks.gpu.main(parser.parse_args(["--all", "--rehearse"]))
    benchmarks.gpu.main(parser.parse_args(["--stage", "timing"]))
    assert given == [[stage.name for stage in STAGES], ["timing"]]
    benchmarks.gpu.main(parser.parse_args(["--wheels"]))
    out = capsys.readouterr().out
    assert all(name in out for name in wheels.NEEDED) and "pip download" in out
    monkeypatch.setattr(session.Runner, "run", lambda self, names: False)
    with pytest.raises(SystemExit):
        benchmarks.gpu.main(parser.parse_args(["--all"]))


# A stage's own process.


def noted(tmp_path, rows, monkeypatch):
    """What a process notes of a stage, and whether it exits with an error."""
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
        yield "Numbers", {"x": 1, "verdict": setting.WRONG}

    found, failed = noted(tmp_path, fails, monkeypatch)
    assert found == [["row", ["Numbers", {"x": 1.5}]], ["failed", "ValueError: first\nsecond"]]
    assert failed
    (tmp_path / "rows").unlink()
    assert noted(tmp_path, skips, monkeypatch) == ([["skipped", "one GPU here"]], False)
    (tmp_path / "rows").unlink()
    found, failed = noted(tmp_path, wrong, monkeypatch)
    assert failed and found[-1][0] == "failed"


def test_without_a_gpu_a_stage_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "rows"
    with pytest.raises(SystemExit):
        child.main("timing", str(path), False)
    kind, what = json.loads(path.read_text())
    assert kind == "failed" and "no GPU" in what


def in_child(value):
    return os.environ["DS_EXT_TEST_VALUE"], os.getpid(), value


@pytest.mark.slow
def test_a_job_runs_in_a_process_with_its_environment():
    on = dataclasses.replace(ON, device=torch.device("meta"))  # no rehearsal, no GPU either
    value, pid, given = setting.separately(on, in_child, 3, env={"DS_EXT_TEST_VALUE": "a"})
    assert (value, given) == ("a", 3) and pid != os.getpid()
    assert "DS_EXT_TEST_VALUE" not in os.environ


# Carried wheels.


def test_wheels_that_python_lacks_are_installed_once(tmp_path, monkeypatch):
    folder, site = tmp_path / "whl", tmp_path / "site"
    folder.mkdir()
    calls = []
    monkeypatch.setattr(wheels.subprocess, "run", lambda command, **_: calls.append(command))
    monkeypatch.setattr(wheels, "_is_lacking", lambda name: name in ("hjson", "pydantic-core"))
    assert wheels.installed(folder, site) is None
    names = ("hjson-3.1.0-py3-none-any.whl", "einops-0.8.2-py3-none-any.whl")
    names += ("pydantic_core-2.50.4-cp312-cp312-manylinux_2_17_x86_64.whl",)
    for name in names:
        (folder / name).write_bytes(b"0" * 1500)
    site.mkdir()
    for _ in range(2):
        assert wheels.installed(folder, site) == site
    (command,) = calls
    assert {"--no-index", "--no-deps"} <= set(command)
    assert [path.name for path in command[-2:]] == [names[2], names[0]]  # those it lacks
    listed = wheels.listed(folder)
    assert f"| hjson | {wheels.version('hjson')} | DeepSpeed | 0.00150 | {names[0]} |" in listed
    assert "| missing |" in listed


# Each stage, on the CPU with a tiny model.


def rehearsed(stage, on=ON):
    """The rows of a stage, without their headings."""
    with setting.using_kernels(on.trains_by):
        return [row for _, row in stage.rows(on)]


@needs.triton
@pytest.mark.slow
def test_checks_see_a_wrong_step(monkeypatch):
    shapes, device = ((6, 20), (9,)), torch.device("cpu")
    row = checks.check("adalomo", "fp32", "nearest", (1, 3), shapes, device)
    assert row["verdict"] == "right" and row["error"] <= checks.CLOSE
    assert checks.with_nan("adalomo", "bf16", (0, 2), shapes, device)["verdict"] == "right"
    make = checks.optimizer_of

    def other_rate_by_torch(*of):
        optimizer = make(*of)
        optimizer.param_groups[0]["lr"] *= 1 if devices.DEVICES else 1.001
        return optimizer

    monkeypatch.setattr(checks, "optimizer_of", other_rate_by_torch)
    assert checks.check("adalomo", "fp32", "nearest", (1, 3), shapes, device)["verdict"] == "WRONG"


@needs.triton
@pytest.mark.slow
def test_checks_cover_dtypes_storages_and_ranks():
    found = rehearsed(checks)
    assert {row["verdict"] for row in found} == {"right"}
    storages = {(row["dtype"], row["weight_update"], row["rank"]) for row in found}
    assert len(storages) == 3 * (1 + 4 + 4) and len(found) == 27 + 9


@needs.triton
def test_a_nan_that_is_written_is_seen(monkeypatch):
    monkeypatch.setattr(checks, "_judge", lambda optimizer, updates: None)
    row = checks.with_nan("lomo", "fp32", (0, 1), ((6, 20), (9,)), torch.device("cpu"))
    assert row["verdict"] == "WRONG" and not row["unchanged"] and not row["reported"]


@needs.nvidia
@pytest.mark.slow
def test_kernels_are_compiled_as_launches_look_them_up(tmp_path, monkeypatch):
    """A launch after it, whatever its arguments are, adds no file to Triton's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    asked = compiling.asked_for(ON)
    assert len(compiling.distinct(asked)) < len(asked) / 2
    monkeypatch.setattr(compiling, "asked_for", lambda on: asked)
    (row,) = rehearsed(compiling)
    assert row["verdict"] == "right" and row["kernels"] == 2
    before = sorted(tmp_path.rglob("*"))
    assert any(path.suffix == ".cubin" for path in before)
    given = [
        [warps, {key: compiling.plain(x) for key, x in named.items()}]
        for warps, named in compiling.distinct(asked)[: ON.kernels]
    ]
    env = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH],
        input=json.dumps(given),
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["cached"] * 2, done.stderr[-2000:]
    assert sorted(tmp_path.rglob("*")) == before


LAUNCH = """
import json, sys
import torch, triton
from triton.compiler import compiler
from benchmarks.gpu.compiler import Driver
from benchmarks.gpu.compiling import given
from ds_ext.ops.executors.triton import launches
from ds_ext.ops.executors.triton.columns import ARGUMENTS
triton.runtime.driver.set_active(Driver(90))
class Stop(Exception): pass
def stop(*args, **kwargs): raise Stop
def hit(*args, **kwargs): print("cached"); raise Stop
compiler.ASTSource.make_ir = stop  # which a compilation begins with
compiler.CompiledKernel.launch_metadata = compiler.CompiledKernel._init_handles = hit
for warps, named in json.load(sys.stdin):
    launch = launches.Launch((), None, None, 1, warps, {k: given(x) for k, x in named.items()})
    try:
        arguments = [2**40 + 16 * i for i in range(ARGUMENTS)]
        launches.launch_kernel(launch, arguments, torch.device("cpu"))
    except Stop:
        pass
"""


@needs.triton
@pytest.mark.slow
def test_a_kernel_that_does_not_compile_fails_the_stage(monkeypatch):
    monkeypatch.setattr(compiling, "asked_for", lambda on: [(4, {"COUNT": 16})])
    rows = rehearsed(compiling)
    assert [row["verdict"] for row in rows] == ["WRONG", "WRONG"] and "COUNT" in str(rows[0])


@pytest.mark.slow
def test_tests_of_kernels_run_in_a_process():
    (row,) = rehearsed(kernel_tests)
    assert row["verdict"] == "right" and row["passed"] == 4
    failing = kernel_tests.pytest(
        "none", ["tests/unit/test_apply.py", "-k", "nothing_has_this_name"]
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
def test_memory_is_measured_for_each_optimizer():
    rows = rehearsed(training_memory)
    assert [row["optimizer"] for row in rows] == ["LOMO", "AdamW", "LOMO"]
    assert {row["verdict"] for row in rows} == {"right"}
    assert rows[2]["paper, GB"] == training_memory.PAPER["LOMO"] and rows[0]["paper, GB"] is None


def test_what_does_not_fit_is_a_row(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(training_memory, "trained", full)
    row = training_memory.measured(ON, "LOMO", (1, 8))
    assert row["losses"] == "does not fit" and "active, GB" in row


@needs.triton
def test_passes_are_timed_beside_a_copy_and_adamw():
    rows = rehearsed(timing)
    assert [row["step"] for row in rows] == ["copy_", timing.ADAMW, "LOMO"] * 2
    assert all(row["ms"] > 0 and row["ms / copy_"] > 0 for row in rows)


def test_idle_time_and_overlap_of_intervals():
    found = profile.of_intervals([(0, 10, 1), (10, 20, 1), (15, 30, 2), (50, 60, 1), (52, 54, 1)])
    assert found == {"span, ms": 0.06, "idle, ms": 0.02, "overlap, ms": 0.005, "streams": 2}
    assert profile.of_intervals([])["streams"] == 0


@needs.triton
def test_a_step_is_profiled_for_each_bucket_size():
    rows = rehearsed(profile)
    assert [row["elements of a bucket"] for row in rows] == [*ON.bucket_sizes]
    assert rows[0]["buckets"] > rows[1]["buckets"] >= 1
    assert all(row["host, µs a bucket"] > 0 and row["span, ms"] > 0 for row in rows)


@needs.triton
def test_one_rank_calls_collectives_and_equals_a_plain_step():
    rows = rehearsed(one_rank)
    assert [row["way"] for row in rows] == [*one_rank.WAYS]
    assert {row["verdict"] for row in rows} == {"right"}
    assert all(row["rounds"] > 0 for row in rows) and rows[0]["sums of gradients"] > 1


def two(on=ON):
    return one_rank.on_rank(torch.distributed.get_rank(), 2, on)


def test_two_ranks_equal_one_process_on_the_batches_of_both():
    for rows in worlds.run(2, two):
        assert {row["verdict"] for row in rows} == {"right"}, rows


def test_two_ranks_need_two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(setting.Skip, match="two GPUs, and 1 is here"):
        [*two_ranks.rows(setting.GPU)]


def by_deepspeed():
    return rehearsed(deepspeed_one_rank)


def test_deepspeed_and_trainer_equal_a_plain_step():
    (rows,) = worlds.run(1, by_deepspeed)
    assert [row["way"] for row in rows] == ["engine", "HF Trainer"]
    assert {row["verdict"] for row in rows} == {"right"}, rows


def test_deepspeed_is_skipped_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(deepspeed_one_rank.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(setting.Skip, match="--wheels"):
        rehearsed(deepspeed_one_rank)
