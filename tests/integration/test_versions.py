"""The oldest versions of DeepSpeed and transformers that are supported; others are refused.

The newest are what the other tests run with. The oldest lie in a folder of their own, made by
``make test-all``, which comes first on the path of the tests that are run here.
"""

import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from ds_ext.config import validation
from ds_ext.engine import versions
from ds_ext.versions import check_torch, numbers, written

ROOT = Path(__file__).parents[2]
OLDEST = Path(sys.prefix) / "oldest"
LACKING = [
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size"),
    ({"expert_parallel": {"enabled": True}}, "expert_parallel.enabled"),
    ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "zero_hpz_partition_size"),
    ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights"),
    ({"ds_ext": {"shard_size": 1}}, "ds_ext.shard_size"),
    ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
]

oldest = pytest.mark.skipif(
    not OLDEST.is_dir(), reason="the oldest versions are installed by `make test-all`"
)


def run(*arguments):
    """Tests, or code, that run with the oldest versions."""
    own = {"DS_EXT_TEST_PACKAGES": str(OLDEST)}
    own["PYTHONPATH"] = os.pathsep.join([str(OLDEST), str(ROOT)])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_pipelines_need_a_newer_deepspeed():
    versions.refuse_old_pipelines("0.19.4")
    with pytest.raises(ValueError, match="PipelineModule: DeepSpeed 0.19.0 .*install 0.19.4"):
        versions.refuse_old_pipelines("0.19.0")


@pytest.mark.slow
@oldest
def test_the_oldest_versions_equal_the_authors():
    """ZeRO 0 to 3, a resumed run, and HF Trainer, by tests that compare with the authors' code."""
    of_trainer = "equals_one_process and adalomo and not lora or would_drop"
    tests = {
        "tests/distributed/test_zero.py": "equals_the_authors and (adalomo or came) or resumed",
        "tests/integration/test_trainer.py": of_trainer,
    }
    words = " or ".join(f"({words})" for words in tests.values())
    options = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "-k", words)
    done = run("-m", "pytest", *options, *tests)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.slow
@oldest
def test_these_are_the_oldest_that_are_supported():
    code = "import deepspeed, ds_ext; print(deepspeed.__version__, 'adalomo' in "
    code += "__import__('deepspeed.runtime.config', fromlist=['x']).DEEPSPEED_OPTIMIZERS)"
    version, knows = run("-c", code).stdout.split()[-2:]
    assert numbers(version) == versions.LOWEST and knows == "True"
    lowest = {d.name: d.version for d in distributions(path=[str(OLDEST)])}
    required = (ROOT / "setup.cfg").read_text()
    for name in ("deepspeed", "transformers", "accelerate"):
        parts = numbers(lowest[name])
        assert any(f"{name}>={written(parts[:n])}" in required for n in (1, 2, 3)), name


def test_another_version_is_one_sentence():
    for version in ("0.17.6", "0.18.5", "0.20.0"):
        with pytest.raises(ImportError, match=f"0.18.6 and newer, below 0.20, and {version} is"):
            versions.check(version)
    for version in ("0.18.6", "0.18.9+cu12", "0.19.8", "0.19.99"):
        versions.check(version)
    with pytest.raises(ImportError, match="torch 2.4 or newer, and 2.3.1.cpu is installed"):
        check_torch("2.3.1+cpu")
    check_torch("2.4.0")


@pytest.mark.parametrize("config, key", LACKING)
def test_what_a_version_lacks_is_refused_by_name(config, key):
    (problem,) = validation.needs_newer_deepspeed(config, "0.18.6")
    assert re.search(rf"{key} = .* needs DeepSpeed 0\.19\.\d or newer", problem)
    assert not [*validation.needs_newer_deepspeed(config, "0.19.8")]
    off = {"tensor_parallel": {"autotp_size": 1}, "expert_parallel": {"enabled": False}}
    assert not [*validation.needs_newer_deepspeed(off, "0.18.6")]


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
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "DeepSpeed is not installed here" in done.stdout
    required = (ROOT / "setup.cfg").read_text().split("install_requires =")[1].split("\n[")[0]
    assert "deepspeed" not in required
