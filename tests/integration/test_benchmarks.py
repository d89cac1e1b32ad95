"""The benchmarks' own arithmetic: timing in turns, tables, watched memory, bytes sent."""

import argparse
import json
import math
import types

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import (
    collectives,
    comm,
    history,
    host,
    host_gpu,
    memory,
    offload,
    path,
    report,
    step,
    traffic,
    train,
)
from ds_ext.optimizer import OPTIMIZERS, host_offload
from tests import worlds
from tests.common import authors, needs, pretend

CPU = torch.device("cpu")


class Clock:
    """Time that passes only where it is told to."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def perf_counter(self):
        return self.now

    def candidate(self, name, seconds):
        left = iter(seconds)

        def run():
            self.log.append(name)
            self.now += next(left)

        return run

    def sync(self):
        self.log.append("sync")


def test_candidates_are_timed_in_turns_after_a_warm_up(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(report, "time", clock)
    candidates = {"a": clock.candidate("a", [9, 1, 2]), "b": clock.candidate("b", [9, 4, 6])}
    times = report.interleaved(candidates, 2, clock.sync)
    assert times == {"a": [1, 2], "b": [4, 6]}
    assert clock.log == ["sync", "a", "sync", "sync", "b", "sync"] * 3


def test_a_candidate_waits_for_the_device(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(report, "time", clock)
    late = 0.0

    def launch():
        nonlocal late
        late = 5.0

    def sync():
        nonlocal late
        clock.now += late
        late = 0.0

    assert report.interleaved({"a": launch}, 1, sync) == {"a": [5]}


def test_ratios_are_of_one_round():
    times = {"unit": [1.0, 10.0, 2.0], "other": [3.0, 10.0, 4.0]}
    assert report.ratios(times, "unit") == {"unit": (1, 1), "other": (2, 1)}  # 3, 1 and 2


def test_a_table_has_the_columns_of_its_first_row():
    rows = [{"name": "a", "n": 12345, "x": 1.5}, {"x": None, "n": 7, "name": "b"}]
    assert report.table(rows).splitlines() == [
        "| name | n | x |",
        "| --- | --- | --- |",
        "| a | 12,345 | 1.50 |",
        "| b | 7 |  |",
    ]


@pytest.mark.parametrize(
    "value, shown",
    [
        (0.0, "0"),
        (9.999, "10.0"),
        (0.012345, "0.0123"),
        (123456.0, "123,000"),
        (-2.5, "-2.50"),
        (1.234e-6, "1.23e-06"),
        (float("nan"), "nan"),
        (True, "True"),
    ],
)
def test_floats_have_three_digits(value, shown):
    assert report.table([{"x": value}]).endswith(f"| {shown} |")


@pytest.mark.parametrize("gpu, name", [("", "speed"), ("NVIDIA H200", "speed_nvidia-h200")])
def test_results_are_written_beside_those_of_other_machines(gpu, name, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "_gpu", lambda: gpu)
    monkeypatch.setattr(report, "machine", lambda: "two cores")
    monkeypatch.setattr("sys.argv", ["benchmarks", "step", "--sizes", "1 2"])
    report.write("speed", "Speed", "How.", {"Times": [{"s": 1.0}]}, lambda f: f.subplots())
    written = (tmp_path / "results" / f"{name}.md").read_text()
    assert written.split("\n\n") == [
        "# Speed",
        "How.",
        "## Times",
        "| s |\n| --- |\n| 1.00 |",
        f"![Speed]({name}.png)",
        "two cores.\nMade by `python -m benchmarks step --sizes '1 2'`.\n",
    ]
    assert (tmp_path / "results" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_benchmark_is_imported_when_it_is_chosen(monkeypatch):
    imported, given = [], []

    def module(name):
        imported.append(name)
        add = lambda parser: parser.add_argument("--rounds", type=int)  # noqa: E731
        return types.SimpleNamespace(__doc__="What.", add_arguments=add, main=given.append)

    monkeypatch.setattr(command.importlib, "import_module", module)
    command.main(["train", "--rounds", "3"])
    assert (imported, given) == (["benchmarks.train"], [argparse.Namespace(rounds=3)])
    with pytest.raises(SystemExit):
        command.main(["nothing"])
    assert imported == ["benchmarks.train"]


@pytest.mark.parametrize("module", [memory, comm, train, offload])
def test_options_have_defaults_of_their_own_choices(module):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    args = parser.parse_args([])
    assert set(args.models) <= set(getattr(module, "MODELS", memory.LLAMAS))


# Memory. A float takes 4 bytes.


def test_tensors_are_counted_from_when_they_are_made_until_they_are_freed():
    kept = torch.zeros(100)
    with memory.LiveMemory([kept, kept.view(10, 10)]) as watch:
        assert watch.now == watch.most == 400
        a = torch.ones(1000)
        assert watch.now == 4400
        b = kept + 1
        assert watch.now == 4800
        del a
        assert (watch.now, watch.most) == (800, 4800)
        c = torch.ones(50)
        assert (watch.now, watch.most) == (1000, 4800)
    del b, c
    assert watch.now == 400


def test_what_needs_no_memory_of_its_own_is_not_counted():
    kept = torch.ones(100)
    with memory.LiveMemory([kept]) as watch:
        kept.mul_(2).add_(1)
        torch.mul(kept, 3, out=kept)
        parts = [kept.view(10, 10).t(), kept[3:], kept.detach(), *kept.split(30)]
        assert (watch.now, watch.most) == (400, 400)
        doubled = parts[0] * 2
        view = doubled[1:]
        del doubled
        assert watch.now == 800
        del view
        assert watch.now == 400


def test_a_storage_that_grows_counts_as_it_is():
    with memory.LiveMemory([]) as watch:
        x = torch.ones(100)
        x.resize_(300)
        assert watch.now == 1200


def test_backward_is_watched():
    w, c = torch.ones(1000, requires_grad=True), torch.ones(1000)
    with memory.LiveMemory([w, c]) as watch:
        loss = (w * c).sum()  # the product is freed: nothing saves it
        assert (watch.now, watch.most) == (8004, 12004)
        loss.backward()  # the gradient of the loss, and the product that becomes that of w
        assert (watch.now, watch.most) == (12004, 12008)
        w.grad = None
        assert watch.now == 8004


def test_the_second_step_is_measured():
    kept, state, scratch = torch.ones(10), [], iter([5000, 200])

    def step():
        state[:] = state or [torch.ones(100)]
        torch.ones(next(scratch))

    assert memory.peak_of_second(step, [kept], CPU) == 40 + 400 + 800


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


def test_the_largest_model_that_fits():
    giga = 2**30
    peaks = [("1B", 24 * giga), ("7B", 24 * giga + 1), ("13B", None)]
    rows = [memory.Measured(model, 128, "LOMO", peak) for model, peak in peaks]
    rows += [memory.Measured("1B", 512, "LOMO", 200 * giga)]
    (short, long) = memory.largest(rows)
    caps = {"24 GiB": "1B", "48 GiB": "7B", "80 GiB": "7B", "139 GiB": "7B"}
    assert short == {"tokens": 128, "optimizer": "LOMO"} | caps
    assert long == {"tokens": 512, "optimizer": "LOMO"} | dict.fromkeys(caps, "none")


def test_a_row_is_compared_with_adamw_of_the_same_model_and_length():
    kinds = [("135M", 128, "LOMO", 10), ("135M", 512, "AdamW", 50), ("135M", 128, "AdamW", 40)]
    rows = [memory.Measured(*kind) for kind in kinds]
    row = memory.shown(rows[0], rows)
    assert row["AdamW / this"] == 4
    assert row["bytes per parameter"] == 10 / 134_515_008
    assert memory.shown(rows[0], rows[:2])["AdamW / this"] is None
    lost = memory.shown(rows[0]._replace(peak=None), rows)
    assert (lost["peak, bytes"], lost["AdamW / this"]) == ("does not fit", None)


# Collectives.


@pytest.mark.parametrize(
    "kind, ranks, expected",
    [
        (comm.ALL_REDUCE, 2, 120),
        (comm.REDUCE_SCATTER, 2, 60),
        (comm.ALL_GATHER, 2, 60),
        ("broadcast", 4, 90),
        (comm.ALL_REDUCE, 4, 180),
        (comm.ALL_REDUCE, 1, 0),
    ],
)
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


@pytest.mark.parametrize(
    "modules, package",
    [
        (["ds_ext.distributed.layout"], "ds_ext"),
        (
            ["ds_ext.distributed.layout", "deepspeed.comm.comm"],
            "ds_ext",
        ),  # by way of DeepSpeed's wrappers
        (["ds_ext.engine.layouts", "deepspeed.runtime.zero.partition_parameters"], "deepspeed"),
        (["deepspeed.runtime.engine", "lomo_optim.adalomo"], "lomo_optim"),
        (["somewhere"], "other"),
    ],
)
def test_the_innermost_package_is_the_caller(modules, package):
    call = collectives._caller
    for name in reversed(modules):
        inside = {"__name__": name, "call": call}
        exec("def outer(): return call()", inside)
        call = inside["outer"]
    assert call() == package


def test_a_steps_figures():
    theirs = [comm.Call("lomo_optim", comm.ALL_REDUCE, n) for n in (400, 4)]
    gathering = comm.Call("deepspeed", comm.ALL_GATHER, 10**6)
    ours = [
        comm.Call("ds_ext", comm.REDUCE_SCATTER, 404),
        comm.Call("ds_ext", comm.ALL_REDUCE, 8),
        comm.Call("ds_ext", comm.ALL_REDUCE, 4),
        comm.Call("ds_ext", comm.ALL_GATHER, 400),
        gathering,
    ]
    upstream = comm.Step([*theirs, gathering], 400, [])
    assert comm.figures(upstream, upstream, 2) == {
        "sent by the optimizer, bytes": 404,
        "/ upstream": 1,
        "without weights / upstream": 1,
        "other than gradients / gradients": 0.01,
        "calls": 2,
        "buckets": None,
        "rounds of a bucket": None,
        "calls per bucket": None,
    }
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
    assert comm.by_kind([*ours[1:3], gathering], 4) == [
        {
            "called by": "deepspeed",
            "collective": comm.ALL_GATHER,
            "calls": 1,
            "bytes": 10**6,
            "sent, bytes": 750_000,
        },
        {
            "called by": "ds_ext",
            "collective": comm.ALL_REDUCE,
            "calls": 2,
            "bytes": 12,
            "sent, bytes": 18,
        },
    ]


def test_statistics_of_a_matrix_grow_with_its_sides():
    few, many = (sum(comm.statistics((n, n // 2), 2, torch.bfloat16)) for n in (512, 1024))
    assert 4 * 256 < few <= 4 * 2 * (512 + 256 + 8)
    assert 1.9 * few < many < 2.1 * few  # where the gradient grows fourfold


# Speed.


def test_a_runs_row():
    job = train.Job("10M", (2, 50), "fp32", 3)
    found = {
        train.ALONE: train.Found([1.0, 1.0, 4.0], 0, 0),
        train.OURS: train.Found([2.0, 3.0, 4.0], 3 * 10**9, 2 * 10**9),
    }
    row = train.row(job, train.OURS, found)
    assert row == {
        "model": "10M",
        "run": train.OURS,
        "s": 3,
        "tokens/s": 100 / 3,
        f"time / {train.ALONE}": "2.00 (1.00)",
        f"time / {train.BARE}": None,
        f"time / {train.ADAMW}": None,
        "peak, GB": 3,
        train.FLOOR: 2,
    }
    lost = train.row(job, train.ADAMW, found)
    assert list(lost) == list(row)
    assert (lost["s"], lost["tokens/s"]) == ("does not fit", None)


# Steps.

SMALL = step.Size(((64, 48), (48, 64), (48,)))  # sides below GaLore's rank, too


def stepped(name, dtype="fp32", size=SMALL):
    """A case before and after one step of a candidate: weights, and gradients."""
    case = step.Case(size, dtype, CPU)
    before = [p.detach().clone() for p in case.params]
    grads = [p.grad.clone() for p in case.params]
    chosen = [n for n in step.NAMES if n in (name, name.partition(",")[0])]
    step.candidates(dtype, CPU, chosen)[name](case)()
    assert all(torch.equal(p.grad, g) for p, g in zip(case.params, grads, strict=True))
    return before, [p.detach() for p in case.params], grads


def labels():
    """Candidates but one: torch's fused SGD, which may leave bf16 as it is."""
    skipped = {step.FUSED_ADAM, step.PRODUCTS, step.CPU_ADAM}  # a GPU's; no step; long to compile
    for dtype in memory.DTYPES:
        for name in step.candidates(dtype, CPU, [n for n in step.NAMES if n not in skipped]):
            if name != step.UNIT:
                yield pytest.param(dtype, name, id=f"{dtype} {name}")


@pytest.mark.parametrize("dtype, name", list(labels()))
def test_a_candidate_steps_all_it_says(dtype, name):
    before, after, _ = stepped(name, dtype)
    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert moved == [True, True, "GaLore" not in name]  # which steps matrices only


@pytest.mark.parametrize(
    "name, other",
    [
        ("ds_ext.LOMO", step.UNIT),
        ("ds_ext.AdaLomo", step.ADALOMO),
        ("ds_ext.Adafactor", step.ADAFACTOR),
        ("ds_ext.CAME", step.CAME),
        ("ds_ext.GaLoreAdamW", step.GALORE),
    ],
)
def test_candidates_of_one_formula_take_the_same_step(name, other):
    before, own, _ = stepped(name)
    _, theirs, _ = stepped(other)
    for a, b, old in zip(own, theirs, before, strict=True):
        torch.testing.assert_close(a - old, b - old, rtol=1e-3, atol=1e-8)


def test_lamb_and_sgd_take_their_formulas_step():
    before, own, grads = stepped("ds_ext.LAMB")
    for p, g in zip(before, grads, strict=True):
        p.grad = g
    authors.OTHERS["lamb"]([{"params": before, "weight_decay": 0}], lr=1e-3).step()
    torch.testing.assert_close(own, before)
    before, own, grads = stepped(step.UNIT)
    torch.testing.assert_close(own, [p - 1e-3 * g for p, g in zip(before, grads, strict=True)])
    torch.testing.assert_close(stepped(step.PLAIN)[1], own)


@pytest.mark.parametrize("name", step.OURS)
def test_a_run_of_a_matrix_is_stepped(name):
    size = step.Size(((16, 17),), ranks=3)
    before, after, _ = stepped(name, size=size)
    assert [len(p) for p in after] == [size.elements] == [91]  # of 272, by three
    assert not torch.equal(before[0], after[0])
    if name == "ds_ext.LOMO":
        torch.testing.assert_close(after, stepped(step.UNIT, size=size)[1])


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_the_products_of_a_whole_basis_give_the_gradient_back(shape):
    g, like = torch.randn(shape), torch.empty(0)
    q, right = step.basis(shape, like)
    assert right == (shape == (6, 4))
    r, back = torch.empty(shape), torch.empty(shape)
    step.project_and_back(g, q.T if right else q, r, back)
    torch.testing.assert_close(back, g)


def test_short_steps_are_repeated(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(step, "time", clock)
    monkeypatch.setattr(step, "LEAST", 0.5)
    short = clock.candidate("short", [0.9, 0.0625])  # the first makes the state
    assert step.repeats(short, clock.sync) == 8
    assert step.repeats(clock.candidate("long", [11.0]), clock.sync) == 1
    monkeypatch.setattr(report, "time", clock)
    # a step that is not timed, then two that are, in each of two rounds
    names = {step.UNIT: [1.0, 0.25] + [9.0, 0.5, 1.0] * 2, "ds_ext.LOMO": [11.0] + [9.0, 3.0] * 2}
    made = {name: lambda _, n=name, s=s: clock.candidate(n, s) for name, s in names.items()}
    found = step.measure(step.Case(SMALL, "fp32", CPU), made, 1)
    assert found == {step.UNIT: [0.75], "ds_ext.LOMO": [3.0]}


def test_what_cannot_run_is_named_with_the_reason():
    def broken(case):
        raise ValueError("no bf16\nat all")

    def idle(case):
        return lambda: None

    made = {"a": broken, "b": step.torch_sgd, "c": idle, step.COPY: idle}
    found, remarks = step.able(made, "fp32", CPU)
    assert found == {"b": step.torch_sgd, "c": idle, step.COPY: idle}
    assert [tuple(row.values()) for row in remarks] == [
        ("a", "fp32", "left out: ValueError: no bf16"),
        ("c", "fp32", "timed, but does not change the weights"),
    ]


@pytest.mark.parametrize(
    "bound, faster, measured, verdict",
    [
        (2.0, False, 2.0, "met"),
        (1.9, False, 2.0, "missed"),
        (0.5, True, 0.5, "met"),
        (0.6, True, 0.5, "missed"),
    ],
)
def test_goals_are_judged_by_the_median(bound, faster, measured, verdict):
    goal = step.Goal("small", "fp32", "a", "b", bound, faster)
    times = {("small", "fp32"): {"a": [1.0, 2.0, 90.0], "b": [1.0, 1.0, 9.0]}}  # 1, 2 and 10
    row = goal.judged(times)
    assert (row["measured"], row["verdict"]) == (measured, verdict)
    missing = goal.judged({("small", "bf16"): times["small", "fp32"]})
    assert (missing["measured"], missing["verdict"]) == (None, "not measured")


def test_goals_name_what_is_measured():
    found = step.goals(False, ["fp32", "bf16"], step.OURS) + step.goals(True, ["bf16"], step.OURS)
    names = set(step.candidates("fp32", CPU, step.NAMES)) | {step.COPY}
    names |= set(step.candidates("bf16", CPU, step.NAMES))
    assert {goal.name for goal in found} | {goal.by for goal in found} <= names
    assert {goal.size for goal in found} <= set(step.SIZES)
    lomo = step.goals(False, ["fp32", "bf16"], ["ds_ext.LOMO"])
    assert [(goal.name, goal.by) for goal in lomo] == [
        (f"ds_ext.LOMO, {way}", step.PLAIN) for way in step.WAYS
    ]
    came = step.goals(False, ["fp32", "bf16"], ["ds_ext.CAME"])
    assert [(goal.name, goal.by) for goal in came] == [("ds_ext.CAME", step.UNIT)]
    assert step.goals(False, ["fp32"], ["ds_ext.LOMO"]) == []


# The host.


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
    [("lomo", 1, 1, 1), ("lamb", 4, 1, 11), ("adalomo", 10, 2, 16), ("came", 12, 2, 8)],
)
def test_a_bucket_of_7b_takes_a_few_launches_and_copies(name, launches, copies, calls):
    row = host_gpu.row(name, 1)
    assert row["buckets"] < 30 and row["rounds"] == {"lomo": 0, "came": 2}.get(name, 1)
    assert row["launches"] == launches and row["copies"] == copies and row["torch"] == calls


@needs.triton
def test_a_step_of_a_matrix_runs_few_functions():
    """The most that a step of one matrix may run of ds_ext: the path that a reader follows."""
    by_native = path.plain(512)
    assert by_native["calls"] <= 280 and by_native["functions"] <= 156 and by_native["files"] <= 29
    with traffic.asked_for():
        by_kernels = path.plain(512)
    assert by_kernels["functions"] <= 200 and by_kernels["files"] <= 32
    assert 0 < by_native["functions"] < by_kernels["functions"] < by_kernels["calls"]


# Offload.


@pytest.mark.parametrize("name", ["adalomo", "came", "adafactor"])
def test_a_step_in_flight_moves_what_it_says(name, monkeypatch):
    monkeypatch.setattr(host_offload, "SMALL", 4000)
    shapes = [(64, 48), (32, 80)]
    with pretend.device() as device:
        rows = offload.alone(OPTIMIZERS[name], shapes, torch.bfloat16, pretend.DEVICE, rounds=2)
        assert device.copied["in"] > 0
    rows = {row["way"]: row for row in rows}
    assert {way: row["same bits"] for way, row in rows.items()} == dict.fromkeys(
        offload.WAYS, "yes"
    ) | {offload.COPIES: ""}
    elements = sum(math.prod(shape) for shape in shapes)
    momentum = 4 * elements if name == "came" else 0
    statistics = 4 * sum(map(sum, shapes)) * (2 if name == "came" else 1)
    stays = {way: row["stays on the GPU, MB"] * 1e6 for way, row in rows.items()}
    assert stays[offload.DEVICE] == pytest.approx(2 * elements + momentum + statistics)
    assert stays[offload.FLIGHT] == pytest.approx(momentum + statistics)
    assert stays[offload.BOTH] == pytest.approx(statistics)
    assert stays[offload.BY_HOST] == stays[offload.COPIES] == 0


def _trained(kinds: list[str]) -> list[dict[str, object]]:
    offload.MODELS["tiny"] = (64, 16, 24, 1, 2, 2, False)
    jobs = [offload.Job("tiny", "came", kind, "fp32", 8, 2) for kind in kinds]
    return [job.row(job.measure()) for job in jobs]


def test_every_kind_of_offload_can_be_trained_with():
    (rows,) = worlds.run(1, _trained, list(offload.OFFLOADS))
    assert [row["offload"] for row in rows] == list(offload.OFFLOADS)
    assert all(row["s"] > 0 for row in rows)
    possible = [offload.Job("1B", "adalomo", kind, "bf16", 8, 2) for kind in offload.OFFLOADS]
    assert [job.is_possible for job in possible] == [True, True, True, False]


def test_the_history_gets_a_line_for_each_run(tmp_path, monkeypatch):
    """Ratios are to torch's SGD in the same round."""
    seconds = iter((2.0, 4.0, 3.0, 5.0))  # of fp32 and bf16 in two runs

    def measure(case, made, rounds, clock):
        took = next(seconds)
        return {name: [1.0 if name == step.PLAIN else took] * rounds for name in made}

    monkeypatch.setattr(step, "measure", measure)
    # tests may run without a repository
    monkeypatch.setattr(history, "commit", lambda: {"commit": "1234567", "date": "2026-11-24"})
    given = argparse.Namespace(size="512x512", rounds=3, out=tmp_path)
    for _ in range(2):
        history.main(given)
    first, second = map(json.loads, (tmp_path / "history.jsonl").read_text().splitlines())
    assert {*first["ratios"]["fp32"]} == {*step.OURS, step.ADAMW}
    assert {*first["ratios"]["fp32"].values(), *second["ratios"]["bf16"].values()} == {2.0, 5.0}
    page = (tmp_path / "history.md").read_text()
    assert page.index("| 3.00 |") < page.index("| 2.00 |")  # the newest comes first
    assert (tmp_path / "history.png").exists()
