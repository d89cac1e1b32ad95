"""The oldest versions of DeepSpeed and transformers that are supported; others are refused.

The newest are what the other tests run with. The oldest lie in a folder of their own, made by
``make test-all``, which comes first on the path of the tests that are run here.
"""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

import deepspeed
import pytest

from ds_ext import contract
from ds_ext.contract import LOWEST, check_lowest, numbers, written
from tests.common import apart
from tests.tools import contract as recording
from tests.tools.versions import quick_tests, run_with

ROOT = Path(__file__).parents[2]
OLDEST = Path(sys.prefix) / "oldest"
oldest = pytest.mark.skipif(
    not OLDEST.is_dir(), reason="the oldest versions are installed by `make test-all`"
)


@pytest.mark.slow
@oldest
def test_the_oldest_versions_equal_the_authors():
    done = quick_tests(OLDEST, of_torch=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.slow
@oldest
def test_these_are_the_oldest_that_are_supported():
    code = "import deepspeed, ds_ext; print(deepspeed.__version__, "
    code += "hasattr(deepspeed.DeepSpeedEngine.__init__, '__wrapped__'))"
    version, knows = run_with(OLDEST, "-c", code).stdout.split()[-2:]
    assert numbers(version) == LOWEST["deepspeed"] and knows == "True"
    lowest = {d.name: d.version for d in distributions(path=[str(OLDEST)])}
    required = (ROOT / "pyproject.toml").read_text()
    for name in ("deepspeed", "transformers", "accelerate"):
        parts = numbers(lowest[name])
        assert any(f"{name}>={written(parts[:n])}" in required for n in (1, 2, 3)), name


def test_an_old_version_is_one_sentence():
    for version in ("0.18.6", "0.19.7"):
        with pytest.raises(ImportError, match=f"0.19.8 and newer, and {version} is"):
            check_lowest("deepspeed", version)
    for version in ("0.19.8", "0.19.9+cu12", "0.20.0"):
        check_lowest("deepspeed", version)
    with pytest.raises(ImportError, match="torch 2.6 and newer, and 2.5.1.cpu is installed"):
        check_lowest("torch", "2.5.1+cpu")
    check_lowest("torch", "2.6.0")


@pytest.mark.slow
def test_plain_pytorch_needs_no_deepspeed(tmp_path):
    """Nor the commands that do not ask DeepSpeed."""
    code = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *args: None if name == "deepspeed" else find(name, *args)
import torch, ds_ext
layer = torch.nn.Linear(2, 2)
optimizer = ds_ext.AdaLomo(layer.parameters(), lr=0.1)
ds_ext.fuse_into_backward(layer, optimizer)
layer(torch.ones(1, 2)).sum().backward()
optimizer.step()
from ds_ext.commands.cli import main
main(["config", "came"])
open("ds.json", "w").write('{"optimizer": {"type": "Came", "params": {"lrr": 1}}}')
assert main(["check", "ds.json"]) == 1
"""
    done = apart.python("-c", code, cwd=tmp_path, DS_ACCELERATOR=None)
    assert "DeepSpeed is not installed here" in done.stdout
    (required,) = re.findall(r"(?m)^dependencies = .+", (ROOT / "pyproject.toml").read_text())
    assert "torch" in required and "deepspeed" not in required


# A program with engines of DeepSpeed and of ds_ext, and one without DeepSpeed's engine; DeepSpeed
# claims to be 0.20, after a change of the given kind.
NEXT = """
import importlib.metadata, sys, deepspeed, torch
real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.20.0" if name == "deepspeed" else real(name)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s
Engine = deepspeed.DeepSpeedEngine
{change}
import ds_ext
torch.distributed.init_process_group(
    "gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1
)

def train(kind):
    layer = torch.nn.Linear(2, 2)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 2}}
    config["zero_allow_untested_optimizer"] = True
    config["optimizer"] = {"type": kind, "params": {"lr": 0.1}}
    params = list(layer.parameters())
    engine = deepspeed.initialize(model=layer, model_parameters=params, config=config)[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    engine.destroy()

train("SGD")
layer = torch.nn.Linear(2, 2)
ds_ext.fuse_into_backward(layer, ds_ext.AdaLomo(layer.parameters(), lr=0.1))
layer(torch.ones(1, 2)).sum().backward()
train("CAME")
print("trained")
"""
CHANGED = "Engine.clip_fp32_gradients = lambda self, new: None"
NEWER = [("", "", "trained"), (CHANGED, "1", "trained")]
NEWER += [(CHANGED, "", "engine:DeepSpeedEngine.clip_fp32_gradients takes (self, new)")]


@pytest.mark.slow
@pytest.mark.parametrize("change, switch, told", NEWER)
def test_a_newer_deepspeed_harms_no_other_engine(change, switch, told, tmp_path):
    given = ("-c", NEXT.replace("{change}", change), tmp_path / "group")
    done = apart.python(*given, fails=True, LOCAL_RANK="0", **{contract.SWITCH: switch})
    output = done.stdout + done.stderr
    assert told in output and (done.returncode == 0) == (told == "trained"), output
    warned = "ds_ext was not tested with deepspeed 0.20.0"
    if told == "trained":
        assert output.count(warned) == 1, output
    else:
        assert output.endswith(
            f'{told}: pip install "deepspeed<=0.19.8", or set {contract.SWITCH}=1 to try this '
            "version all the same.\n"
        )


def test_names_that_are_missing_or_take_other_arguments_are_told(monkeypatch):
    assert contract.broken("deepspeed") == []
    monkeypatch.delattr(deepspeed.DeepSpeedEngine, "_save_zero_checkpoint")
    monkeypatch.setattr(deepspeed.DeepSpeedEngine, "clip_fp32_gradients", lambda self, new: None)
    told = [line.partition(":")[2] for line in sorted(contract.broken("deepspeed"))]
    assert told == [
        "DeepSpeedEngine._save_zero_checkpoint is missing",
        "DeepSpeedEngine.clip_fp32_gradients takes (self, new)",
    ]


def test_the_contract_records_each_name_of_the_table_and_of_the_patches():
    """If this fails: ``make contract ARGS=--write``, in the supported versions."""
    assert sorted(contract.records()["names"]) == recording.names()
    assert contract.accepts(["self", "new="], ["self"])
    assert not contract.accepts(["self", "new"], ["self"])
    text = "def f(a):\n    # why\n    return f'{a} #'\n"
    assert recording.hashed(text) == recording.hashed("def f(a):  # why not\n  return f'{a} #'")
    assert recording.hashed(text) != recording.hashed(text.replace("a}", "a!r}"))
