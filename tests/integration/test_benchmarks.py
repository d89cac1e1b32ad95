"""The benchmarks' own arithmetic: timing in turns, tables, watched memory, bytes sent."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import collectives, comm, host, host_gpu, memory, report, step
from tests.common import needs

CPU = torch.device("cpu")


def test_candidates_are_timed_in_turns_after_a_warm_up(monkeypatch):
    log, now = [], [0.0]

    def candidate(name, *seconds):
        left = iter(seconds)
        return lambda: log.append(name) or now.append(now[-1] + next(left))

    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: now[-1]))
    candidates = {"a": candidate("a", 9, 1, 2), "b": candidate("b", 9, 4, 6)}
    times = report.interleaved(candidates, 2, lambda: log.append("sync"))
    assert times == {"a": [1, 2], "b": [4, 6]}
    assert log == ["sync", "a", "sync", "sync", "b", "sync"] * 3


def test_ratios_are_of_one_round():
    times = {"unit": [1.0, 10.0, 2.0], "other": [3.0, 10.0, 4.0]}
    assert report.ratios(times, "unit") == {"unit": (1, 1), "other": (2, 1)}  # 3, 1 and 2


def test_the_second_step_is_measured():
    kept, state, scratch = torch.ones(10), [], iter([5000, 200])

    def step():
        state[:] = state or [torch.ones(100)]
        torch.ones(next(scratch))

    assert memory.peak_of_second(step, [kept]) == 40 + 400 + 800


@pytest.mark.slow
def test_a_step_takes_what_its_optimizer_must():
    # Wide and with few tokens: weights, gradients and state are nearly all.
    sizes, shape = (1024, 512, 2048, 2, 2, 2, False), (1, 2)
    n = sum(p.numel() for p in memory.llama(sizes, torch.float32, CPU).parameters())
    none, adamw, lomo, adalomo, came = (
        memory.measure(sizes, shape, name, torch.float32, CPU)
        for name in ("none", "AdamW", "LOMO", "AdaLomo", "CAME")
    )
    assert 16 * n < adamw < 16.5 * n
    assert 4 * n < none <= lomo < 5.5 * n
    assert 0 < adalomo - lomo < n
    assert 4 * n < came - lomo < 5.5 * n
    for name in ("FlashAdamW", "Lion", "SCALE", "SinkGD"):
        peak = memory.measure(sizes, shape, name, torch.float32, CPU)
        # LOMO, without a state, lets as many gradients wait to be stepped by together.
        assert peak == pytest.approx(lomo + memory.planned_state(sizes, name), rel=0.02)


SENT = [(comm.ALL_REDUCE, 2, 120), (comm.ALL_REDUCE, 1, 0)]
SENT += [(comm.REDUCE_SCATTER, 2, 60), ("broadcast", 4, 90)]


@pytest.mark.parametrize("kind, ranks, expected", SENT)
def test_bytes_sent_by_a_ring(kind, ranks, expected):
    assert comm.sent(kind, 120, ranks) == expected


def test_a_call_is_noted_with_the_whole_that_is_summed_or_gathered():
    calls, seen = [], []

    def method(group, *args):
        seen.append((group, args))
        return "work"

    part, whole = torch.ones(2), torch.ones(4)
    noting = collectives._noting(method, comm.ALL_GATHER, calls)
    assert noting("group", whole, part, "options") == "work"
    assert noting("group", [part], [[part, part]]) == "work"
    assert collectives._noting(method, comm.ALL_REDUCE, calls)("group", [part, part]) == "work"
    assert [(call.kind, call.nbytes) for call in calls] == [
        (comm.ALL_GATHER, 16),
        (comm.ALL_GATHER, 16),
        (comm.ALL_REDUCE, 16),
    ]
    assert seen[0] == ("group", (whole, part, "options"))


def test_a_steps_figures():
    theirs = [comm.Call("lomo_optim", comm.ALL_REDUCE, n) for n in (400, 4)]
    gathering = comm.Call("deepspeed", comm.ALL_GATHER, 10**6)
    ours = [comm.Call("ds_ext", comm.REDUCE_SCATTER, 404), comm.Call("ds_ext", comm.ALL_REDUCE, 8)]
    ours += [comm.Call("ds_ext", comm.ALL_REDUCE, 4), comm.Call("ds_ext", comm.ALL_GATHER, 400)]
    ours += [gathering]
    upstream = comm.Step([*theirs, gathering], 400, [])
    assert comm.figures(comm.Step(ours, 400, [2, 1]), upstream, 2) == {
        "sent by the optimizer, bytes": 202 + 12 + 200,
        "/ upstream": 414 / 404,
        "without weights / upstream": 214 / 404,
        "other than gradients / gradients": 14 / 200,
        "calls": 4,
        "buckets": 2,
        "rounds of a bucket": 2,
        "calls per bucket": 2,
    }


SMALL = step.Size(((64, 48), (48, 64), (48,)))  # sides below GaLore's rank, too


def stepped(name, dtype="fp32", size=SMALL):
    """A case before and after one step of a candidate: weights, and gradients."""
    case = step.Case(size, dtype)
    before = [p.detach().clone() for p in case.params]
    grads = [p.grad.clone() for p in case.params]
    chosen = [n for n in step.NAMES if n in (name, name.partition(",")[0])]
    step.candidates(dtype, chosen)[name](case)()
    assert all(torch.equal(p.grad, g) for p, g in zip(case.params, grads, strict=True))
    return before, [p.detach() for p in case.params], grads


def labels():
    """Candidates but one: torch's fused SGD, which may leave bf16 as it is."""
    skipped = {step.CPU_ADAM}  # long to compile
    for dtype in memory.DTYPES:
        for name in step.candidates(dtype, [n for n in step.NAMES if n not in skipped]):
            if name != step.UNIT:
                yield pytest.param(dtype, name, id=f"{dtype} {name}")


@pytest.mark.parametrize("dtype, name", list(labels()))
def test_a_candidate_steps_all_it_says(dtype, name):
    before, after, _ = stepped(name, dtype)
    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert moved == [True, True, "GaLore" not in name]  # which steps matrices only


ALIKE = {"LOMO": step.UNIT, "AdaLomo": step.ADALOMO, "Adafactor": step.ADAFACTOR}
ALIKE |= {"CAME": step.CAME, "GaLoreAdamW": step.GALORE}


@pytest.mark.parametrize("name, other", ALIKE.items())
def test_candidates_of_one_formula_take_the_same_step(name, other):
    before, own, _ = stepped(f"ds_ext.{name}")
    _, theirs, _ = stepped(other)
    for a, b, old in zip(own, theirs, before, strict=True):
        torch.testing.assert_close(a - old, b - old, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("name", step.OURS)
def test_a_run_of_a_matrix_is_stepped(name):
    size = step.Size(((16, 17),), ranks=3)
    before, after, _ = stepped(name, size=size)
    assert [len(p) for p in after] == [size.elements] == [91]  # of 272, by three
    assert not torch.equal(before[0], after[0])
    if name == "ds_ext.LOMO":
        torch.testing.assert_close(after, stepped(step.UNIT, size=size)[1])


@pytest.mark.parametrize("name", host.BATCHED)
def test_the_hosts_time_is_of_many_parameters_and_of_no_pass(name):
    row = host.small(name, 20, 2)
    assert row.keys() == {"plain, µs", "in backward, µs"} and row["plain, µs"] > 0
    with host.doing_nothing() as calls:
        p = torch.nn.Parameter(torch.ones(64, 48))
        p.grad = torch.ones_like(p)
        host.made(name, [p]).step()
    most = 11 if name == "sinkgd" else 5  # two for each of its iterations, and one to apply
    assert calls["made"] <= most and torch.equal(p.detach(), torch.ones(64, 48))


@needs.triton
@pytest.mark.parametrize(
    "name, launches, copies, calls",
    [("lomo", 1, 1, 1), ("lamb", 4, 1, 12), ("adalomo", 11, 2, 16), ("came", 13, 2, 9)],
)
def test_a_bucket_of_7b_takes_a_few_launches_and_copies(name, launches, copies, calls):
    row = host_gpu.row(name, 1)
    assert row["buckets"] < 30 and row["rounds"] == {"lomo": 0, "came": 2}.get(name, 1)
    assert row["launches"] == launches and row["copies"] == copies and row["torch"] == calls


@needs.triton
@pytest.mark.slow
def test_a_step_of_a_matrix_runs_few_functions():
    """The most that a step of one matrix may run of ds_ext: the path that a reader follows."""
    printed = subprocess.check_output([sys.executable, "-m", "benchmarks", "path"], text=True)
    counts = re.findall(r"\| (\d+) \| (\d+) \| (\d+) \|", printed)
    by_native, by_ranks, by_kernels = ([*map(int, row)] for row in counts)
    for found, most in ((by_native, 100), (by_ranks, 230), (by_kernels, 147)):
        assert 50 < found[1] <= most < found[0] < 500
    assert by_native[2] <= 18 and by_ranks[2] <= 40 and by_kernels[2] <= 23
