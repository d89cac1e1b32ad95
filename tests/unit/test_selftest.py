"""The check of kernels before their first use: faults, crashes and hangs leave the reference."""

import json
import logging
import math
import os
import shutil

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext import hyperparams
from ds_ext.commands import selftest as command
from ds_ext.commands.cli import main
from ds_ext.ops.executors import unbatched
from ds_ext.ops.executors.native import native_table
from ds_ext.ops.executors.triton import devices, launches
from ds_ext.optimizer import OPTIMIZERS, nonfinite, selftest
from ds_ext.optimizer.selftest import RIGHT
from ds_ext.rules import REGISTRY
from ds_ext.testing import check_rule
from tests import worlds
from tests.common import adan, apart, needs, paths, pretend
from tests.common.apart import refused
from tests.common.choose import params

CPU = torch.device("cpu")
# What a process of a self-test runs first: kernels step tensors of the CPU, and few of them.
AS_IF_ON_A_GPU = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
torch.set_num_threads(1)
from ds_ext.ops.executors.triton import devices, launches
from ds_ext.optimizer import selftest
devices.DEVICES = {"cpu"}
selftest.MATRICES, selftest.OTHER_SHAPES = ((6, 20),), ((9,),)
"""
QUICKENED = "from tests.common import interpreter\ninterpreter.quicken()\n"
CRASHES = "launches.launch_kernel = lambda *of: os.abort()"
HANGS = "import time; launches.launch_kernel = lambda *of: time.sleep(60)"
UNAVAILABLE = {
    "a GPU that serves one process": "def busy(*of, **how): raise RuntimeError('busy')\n"
    "torch.ones = busy",
    "a GPU that is full": "def full(*of): raise torch.OutOfMemoryError('out of memory')\n"
    "launches.launch_kernel = full",
    "an environment that differs": "selftest.check_all = None",
    "a scheduler": "import signal\n"
    "launches.launch_kernel = lambda *of: os.kill(os.getpid(), signal.SIGTERM)",
    "a machine that is too slow": "import time; time.sleep(60)",
}
ENDS = ["os.kill(os.getpid(), 15)", "raise RuntimeError('out of memory')"]
# Trains by kernels that are not checked, by those that are, and by the reference.
TRAINS = """
import sitecustomize, torch, ds_ext
from ds_ext.optimizer import selftest
from ds_ext.ops.executors.triton import devices

def losses():
    torch.manual_seed(0)
    model, x, found = torch.nn.Linear(20, 6), torch.randn(8, 20), []
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    ds_ext.fuse_into_backward(model, optimizer)
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found

unchecked = losses()
selftest.CHECKED = {"cpu"}
checked = losses()
assert not devices.supports(torch.device("cpu"))
print(unchecked[0] == checked[0], unchecked == checked, checked == losses())
"""


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Lets processes that ``in_child`` starts use kernels on the CPU, after some code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def prepare(code=""):
        (tmp_path / "sitecustomize.py").write_text(AS_IF_ON_A_GPU + QUICKENED + code)
        monkeypatch.setattr(selftest, "PACKAGE", tmp_path / "ds_ext")  # whose parent comes first
        monkeypatch.setenv("PYTHONPATH", str(worlds.ROOT))

    return prepare


@pytest.fixture
def kernels(monkeypatch):
    """Kernels step tensors of the CPU, and are checked first, as on a GPU."""
    for switch in ("DS_EXT_KERNELS", "DS_EXT_NATIVE"):
        monkeypatch.setenv(switch, "1")
    paths.use(monkeypatch, "kernels")
    monkeypatch.setattr(selftest, "CHECKED", {"cpu"})
    yield
    monkeypatch.undo()
    unbatched._set({})


def lomo():
    p = nn.Parameter(torch.ones(6, 20))
    p.grad = torch.full_like(p, 0.5)
    return ds_ext.LOMO([p], lr=1.0), p


@needs.triton
@pytest.mark.slow
def test_an_optimizer_is_checked_once_and_the_result_kept(
    child, kernels, caplog, monkeypatch, tmp_path
):
    child()
    with caplog.at_level(logging.INFO, logger="ds_ext"):
        for _ in range(2):
            optimizer, p = lomo()
            optimizer.step()
            assert (p == 0.5).all() and devices.supports(CPU)
    (line,) = caplog.messages
    (file,) = (tmp_path / "cache" / "ds_ext").iterdir()
    assert line.startswith("kernels of lomo checked on cpu in ") and line.endswith(str(file))
    file.write_bytes(file.read_bytes()[:-1])  # cut short: checked again
    monkeypatch.setattr(selftest, "in_child", lambda *of: [{"verdict": RIGHT}] * 2)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="ds_ext"):
        lomo()[0].step()
    assert caplog.messages[0].startswith("kernels of lomo checked") and devices.supports(CPU)


@needs.triton
def test_a_full_disk_keeps_no_result(child, kernels, caplog, monkeypatch, tmp_path):
    child()
    monkeypatch.setattr(selftest, "in_child", lambda *of: [{"verdict": RIGHT}] * 2)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(selftest.library, "seal", full)
    with caplog.at_level(logging.INFO, logger="ds_ext"):
        lomo()[0].step()
    assert caplog.messages[0].startswith("kernels of lomo checked") and devices.supports(CPU)
    assert not [*(tmp_path / "cache" / "ds_ext").iterdir()]


@needs.triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "code, seconds, told",
    [
        (CRASHES, 300, "WRONG: the process ended with status -6"),
        (HANGS, 25, "WRONG: it took longer than 25 s"),
    ],
)
def test_a_crash_or_hang_leaves_the_reference(
    code, seconds, told, child, kernels, caplog, monkeypatch
):
    child(code)
    monkeypatch.setattr(selftest, "SECONDS", seconds)
    before, _ = lomo()
    before._has_agreed = True
    before.step()  # an optimizer that kernels have stepped goes on
    optimizer, p = lomo()
    optimizer.step()
    (warning,) = (r.message for r in caplog.records if r.levelno == logging.WARNING)
    assert "the kernels of lomo are not right" in warning and told in warning
    assert torch.__version__ in warning and "open an issue" in warning
    assert not devices.supports(CPU) and os.environ["DS_EXT_KERNELS"] == "0"
    before.step()
    assert (p == 0.5).all() and (before.param_groups[0]["params"][0] == 0).all()


@needs.triton
@pytest.mark.parametrize("why", params(UNAVAILABLE, lambda why: "serves" in why or "slow" in why))
def test_where_a_second_process_cannot_step_nothing_is_checked(
    why, child, kernels, caplog, monkeypatch
):
    child(UNAVAILABLE[why])
    if "slow" in why:
        monkeypatch.setattr(selftest, "SECONDS", 0.5)
    with caplog.at_level(logging.INFO, logger="ds_ext"):
        lomo()[0].step()
    (line,) = caplog.messages
    assert "not checked" in line and devices.supports(CPU)


@needs.triton
@pytest.mark.parametrize("end", params(ENDS, ENDS[:1]))
def test_what_was_found_wrong_counts_if_a_later_case_is_not_checked(end, child):
    child(
        "rows = [{'verdict': 'WRONG: weights'}]\n"
        "def check(*of):\n"
        f"    if not rows: {end}\n"
        "    return rows.pop()\n"
        "selftest.check = check\n"
    )
    case = ["lomo", {"lr": 0.1}, "fp32"]
    assert selftest.in_child([case], CPU) == [{"verdict": "WRONG: weights"}]


@pytest.mark.slow
def test_a_rule_of_yours_is_checked_in_a_process_that_imports_it(monkeypatch, tmp_path):
    (tmp_path / "own_rules.py").write_text("from tests.common import adan\n\nadan.enter()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(worlds.ROOT)]))
    rows = selftest.in_child([[adan.NAME, {"lr": 0.1}, "fp32"]], CPU, ["own_rules"])
    assert [row["verdict"] for row in rows] == [RIGHT] * len(selftest.RANKS)
    found = []
    monkeypatch.setattr(command, "rows_of", lambda *of: found.append(of) or [])
    assert main(["selftest", "--import", "json", "--device", "cpu"]) == 0
    assert found[0][2] == ["json"]


@needs.triton
@pytest.mark.slow
def test_a_fault_in_a_kernel_is_found_and_training_has_the_losses_of_the_reference(tmp_path):
    shutil.copytree(
        selftest.PACKAGE, tmp_path / "ds_ext", ignore=shutil.ignore_patterns("__pycache__")
    )
    kernel = tmp_path / "ds_ext/ops/executors/triton/kernels/elementwise.py"
    right = kernel.read_text()
    wrong = right.replace("- number(t, F.LR) * u", "- 1.01 * number(t, F.LR) * u")
    assert wrong != right
    kernel.write_text(wrong)
    (tmp_path / "sitecustomize.py").write_text(AS_IF_ON_A_GPU)
    cache = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(tmp_path), "DS_EXT_KERNELS": "1"}
    done = apart.python("-c", TRAINS, cwd=tmp_path, **cache)
    assert done.stdout.split() == ["True", "False", "True"], done.stdout + done.stderr
    (warning,) = (line for line in done.stderr.splitlines() if "not right" in line)
    assert "lomo" in warning and "WRONG: weights" in warning


def fall_back(failing):
    """Builds the hooks on a rank, whose kernels are wrong if it is ``failing``."""
    fails = torch.distributed.get_rank() == failing
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("DS_EXT_KERNELS", "1")
        paths.use(monkeypatch, "kernels")
        monkeypatch.setattr(selftest, "failure", lambda *of: "wrong" if fails else "")
        model = nn.Linear(5, 4)
        ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters()))
        found = devices.supports(CPU)
    unbatched._set({})
    return found


@needs.triton
@pytest.mark.slow
def test_ranks_fall_back_together():
    assert worlds.run(2, fall_back, 1) == [False] * 2
    assert worlds.run(2, fall_back, None) == [True] * 2


def test_switches_select_the_reference(monkeypatch):
    monkeypatch.setattr(devices, "DEVICES", {"cuda"})
    monkeypatch.setenv("DS_EXT_KERNELS", "0")
    monkeypatch.setenv("DS_EXT_NATIVE", "0")
    unbatched._set({})
    assert not devices.supports(torch.device("cuda")) and not native_table.is_available()
    monkeypatch.undo()
    unbatched._set({})
    assert devices.supports(torch.device("cuda")) == needs.TRITON


@pytest.mark.slow
def test_the_command_prints_a_table(capsys):
    assert main(["selftest", "--device", "cpu", "--optimizer", "LOMO"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"device cpu, driver none, torch {torch.__version__}")
    assert "| lomo | bf16 | 10 | 0.0e+00 | right |" in printed


def test_the_command_refuses_what_it_cannot_check(capsys):
    assert "--optimizer is 'LOMOO'" in refused(capsys, "selftest", "--optimizer", "LOMOO")
    assert "--device moon" in refused(capsys, "selftest", "--device", "moon")
    if not torch.cuda.is_available():
        told = refused(capsys, "selftest", "--device", "cuda")
        assert "--device cuda: PyTorch finds no GPU" in told


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_cases_cover_dtypes_storages_and_forms(name):
    cases = selftest.all_cases(OPTIMIZERS[name])
    assert len(cases) == 1 + 4 + 4 + 3 and json.loads(json.dumps(cases)) == cases
    for _, hypers, _ in cases:
        hyperparams.check(OPTIMIZERS[name].hypers, hypers)
    p = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    (case,) = selftest.cases_of(OPTIMIZERS[name]([p], weight_update="master24"))
    assert case[0] == name and case[1]["weight_update"] == "master24" and case[2] == "bf16"
    hyperparams.check(OPTIMIZERS[name].hypers, json.loads(json.dumps(case))[1])


def test_a_wrong_pass_of_native_code_is_seen(monkeypatch):
    case = ["lomo", {"lr": 0.1}, "fp32"]
    row = selftest.check(ds_ext.LOMO, case, (1, 3), CPU)
    assert row["verdict"] == RIGHT and row["error"] == 0
    run = native_table.NativeTable.run

    def wrong(table, call, *args):
        columns = call.columns | {"lr": call.columns["lr"] * 1.001}
        run(table, call._replace(columns=columns), *args)

    monkeypatch.setattr(native_table.NativeTable, "run", wrong)
    row = selftest.check(ds_ext.LOMO, case, (1, 3), CPU)
    assert row["verdict"] == "WRONG: weights" and math.isclose(row["error"], 1e-3, rel_tol=1e-2)


@needs.triton
@pytest.mark.parametrize("device", [CPU, torch.device("cpu", 0)], ids=str)  # as "cuda:0", "cuda"
def test_a_nan_that_kernels_let_through_is_seen(kernels, monkeypatch, device):
    monkeypatch.setattr(selftest, "MATRICES", ((6, 20),))
    monkeypatch.setattr(selftest, "OTHER_SHAPES", ((9,),))
    of = ds_ext.LOMO, ["lomo", {"lr": 0.1}, "bf16"], (1, 3), device
    assert selftest.check(*of)["verdict"] == RIGHT
    monkeypatch.setattr(nonfinite, "MAX_GOOD_VOTES", math.inf)
    assert selftest.check(*of)["verdict"] == "WRONG: a NaN in a gradient"


@needs.triton
def test_a_model_that_kernels_have_stepped_goes_on_without_them(kernels, monkeypatch):
    failures = iter(["", "wrong"])
    monkeypatch.setattr(selftest, "failure", lambda *of: next(failures))
    optimizers, models = [], [nn.Linear(5, 4), nn.Linear(5, 4)]

    def step(i):
        before = models[i].weight.detach().clone()
        models[i](torch.ones(2, 5)).square().sum().backward()
        optimizers[i].step()
        assert not models[i].weight.equal(before) and models[i].weight.isfinite().all()

    for i, kind in enumerate((ds_ext.AdaLomo, ds_ext.LOMO)):
        optimizers.append(kind(models[i].parameters()))
        ds_ext.fuse_into_backward(models[i], optimizers[i])
        assert devices.supports(CPU) == (i == 0)
        step(i)
        monkeypatch.setattr(launches, "launch_kernel", None)  # nothing launches from now on
    step(0)


@pytest.mark.parametrize("name", params(OPTIMIZERS, ["lomo"]))
def test_tensors_of_a_device_do_not_meet_those_of_the_host(name):
    """Weights with masters are read on the host. Nothing steps batches on the pretended device.

    Each rule with every third case, for the same code stores the weights of all.
    """
    kind = OPTIMIZERS[name]
    with pretend.device():
        for case in selftest.all_cases(kind)[[*OPTIMIZERS].index(name) % 3 :: 3]:
            verdict = selftest.check(kind, case, selftest.RANKS[1], pretend.DEVICE)["verdict"]
            assert verdict == f"{selftest.WRONG}: native code and kernels are disabled or missing"


def test_a_rule_of_yours_is_checked_on_a_device():
    with pretend.device():
        torch.set_default_device(pretend.DEVICE)
        try:
            check_rule(REGISTRY["lomo"].rule)
        finally:
            torch.set_default_device(CPU)
