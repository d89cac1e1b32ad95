"""What is installed: every module, type information for type checkers, the license; one version.
Workflows, the Makefile and planted faults: actions are pinned, and what is named exists.
"""

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import ds_ext
from benchmarks.__main__ import BENCHMARKS
from ds_ext.__main__ import separate_build_folder
from ds_ext.hyperparams import names
from ds_ext.optimizer import OPTIMIZERS
from tests.common import apart
from tests.tools.plant_faults import FAULTS

ROOT = Path(__file__).parents[2]
SOURCES = ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
SOURCES += ("CHANGELOG.md",)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the tree, built without a network, and unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        shutil.copy(ROOT / name, folder / name)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ds_ext", folder / "ds_ext", ignore=ignored)
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def files(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)) for p in found if "__pycache__" not in p.parts}


def test_all_files_of_the_package_are_installed_and_no_others(wheel):
    assert files(wheel / "ds_ext") == files(ROOT / "ds_ext")
    assert "py.typed" in files(wheel / "ds_ext")
    assert {path.name.split("-")[0] for path in wheel.iterdir()} == {"ds_ext"}


def test_metadata_say_what_is_true(wheel):
    (info,) = wheel.glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version, is_dev = ds_ext.__version__.removesuffix(".dev0"), ".dev" in ds_ext.__version__
    assert metadata["Version"] == ds_ext.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {citation['version']} – {citation['date-released']}" in changelog
    newest = re.search("(?m)^## (.+)", changelog)[1]
    assert newest.startswith(version) and newest.endswith("(unreleased)") == is_dev
    assert is_dev or citation["version"] == version
    assert "Apache-2.0" == metadata["License-Expression"] == citation["license"]
    assert "Apache License" in next(info.rglob("LICENSE")).read_text()
    assert "Tag: py3-none-any" in (info / "WHEEL").read_text()
    for name in ("LOMO", "AdaLomo", "Adafactor", "CAME", "LAMB", "GaLore"):
        assert name in metadata["Summary"]


def test_extras_allow_the_oldest_versions_that_are_tested(wheel):
    """And none that are older, as far as a requirement says."""
    (info,) = wheel.glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text())
    required = {r.name: r for r in map(Requirement, metadata.get_all("Requires-Dist"))}
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    (oldest,) = re.findall(r"(?m)^OLDEST = (.+)", makefile)
    tested = dict(name.split("==") for name in oldest.split())
    assert {"deepspeed", "transformers", "accelerate", "datasets", "peft"} <= required.keys()
    for name in tested.keys() & required.keys():
        assert required[name].specifier.contains(tested[name]), name
        (lowest,) = re.findall(r">=([\d.]+)", str(required[name].specifier))
        assert f"{tested[name]}.".startswith(f"{lowest}."), name


@pytest.mark.parametrize(
    "kind, given, expected",
    [
        ("venv", None, "env/torch_extensions"),
        ("conda", None, "env/torch_extensions"),
        ("system", None, None),
        ("venv", "mine", "mine"),
        ("missing", None, None),
    ],
)
def test_each_environment_has_a_folder_for_what_deepspeed_builds(
    tmp_path, monkeypatch, kind, given, expected
):
    env = tmp_path / "env"
    if kind != "missing":
        (env / ("conda-meta" if kind == "conda" else "lib")).mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(env))
    base = env if kind in ("conda", "system") else tmp_path
    monkeypatch.setattr(sys, "base_prefix", str(base))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", given or "")  # and restored after the test
    if not given:
        del os.environ["TORCH_EXTENSIONS_DIR"]
    separate_build_folder()
    found = os.environ.get("TORCH_EXTENSIONS_DIR")
    assert found == (given or (expected and str(tmp_path / expected)))


GOOD = """import ds_ext
import torch

model = torch.nn.Linear(2, 2)
params = model.parameters()
ds_ext.AdaLomo(params, lr=1e-3, eps=(1e-30, 1e-3), weight_update="nearest")
fused: ds_ext.RuleOptimizer = ds_ext.GaLoreAdamW.for_model(model, rank=4, others={})
"""
WRONG = {  # and what mypy calls it
    "ds_ext.AdaLomoo(params)": "attr-defined",
    "ds_ext.AdaLomo(params, learning_rate=1e-3)": "call-arg",
    "ds_ext.AdaLomo(params, lr='1e-3')": "arg-type",
    "ds_ext.Muon(params, ns_dtype='fp64')": "arg-type",
    "ds_ext.Muon.for_model(model, momentun=0.9)": "call-arg",
    "ds_ext.AdaLomo.for_model(model, others={})": "call-arg",
    "ds_ext.fuse_into_backward(model, fused, gradient_policy='shared')": "arg-type",
    "ds_ext.fuse_into_backward(model, fused, clip_mode='before')": "arg-type",
}
FIRST = GOOD.count("\n") + 1  # line of the first mistake


@pytest.mark.slow
def test_mypy_finds_misspelt_names(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(GOOD + "\n".join(WRONG) + "\n")
    options = ["--strict", "--follow-imports=silent", f"--cache-dir={ROOT / '.mypy_cache'}"]
    own = {"MYPYPATH": str(ROOT), "PYTHONPATH": None}
    told = apart.python("-m", "mypy", *options, program, cwd=tmp_path, fails=True, **own).stdout
    lines = [line for line in told.splitlines() if ": error: " in line]
    assert [int(line.split(":")[1]) for line in lines] == list(range(FIRST, FIRST + len(WRONG)))
    assert all(f"[{kind}]" in line for line, kind in zip(lines, WRONG.values(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_help_has_each_hyper_parameter_with_its_meaning(name):
    written = re.findall(r"(?m)^    (\w+): .+\.$", inspect.getdoc(OPTIMIZERS[name]))
    assert written == ["params", *names(OPTIMIZERS[name].hypers)]


def test_signatures_are_written_and_names_are_listed():
    signature = str(inspect.signature(ds_ext.AdaLomo))
    assert signature.startswith("(params, *, lr: float = 0.001, eps: tuple[float, float] = ")
    assert "FieldInfo" not in signature
    public = {*ds_ext.__all__, "FuseCallback", "MetricsCallback"}
    assert {"AdaLomo", "fuse_into_backward"} <= public
    assert {name for name in dir(ds_ext) if name[0] != "_"} == public


def test_a_misspelt_optimizer_is_corrected():
    with pytest.raises(AttributeError, match="no attribute 'AdaLom'. Did you mean AdaLomo"):
        ds_ext.AdaLom  # noqa: B018


FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FILES}
STEPS = [
    (f"{name} {job} {i}", step)
    for name, workflow in WORKFLOWS.items()
    for job, told in workflow["jobs"].items()
    for i, step in enumerate(told["steps"])
]
SCRIPTS = {name: step["run"] for name, step in STEPS if "run" in step}


def test_actions_are_pinned_by_their_commit():
    used = [step["uses"] for _, step in STEPS if "uses" in step]
    assert len(used) > 5 and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name) for name in used)
    assert len({*used}) == len({name.partition("@")[0] for name in used})  # one version of each


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_can_be_read_and_name_what_exists(name):
    script = SCRIPTS[name]
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    rules = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([\w./-]+)", script):
        assert re.search(rf"(?m)^{re.escape(target)}( [\w.-]+)*:", rules), target
    assert {*re.findall(r"-m benchmarks (\w+)", script)} <= {*BENCHMARKS}
    assert all((ROOT / path).is_file() for path in re.findall(r"(?<!\S)\.ci/\S+", script))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}: {fault.line[:40]}")
def test_a_fault_has_its_place_and_its_tests(fault):
    source = (ROOT / "ds_ext" / fault.file).read_text()
    assert source.count(fault.line) == 1 and fault.wrong != fault.line
    files = [word for word in shlex.split(fault.tests) if word.endswith(".py")]
    assert files and all((ROOT / "tests" / file).is_file() for file in files)


# The Makefile chooses the build of torch: from an index of CPU builds where there is no GPU.


CPU = "https://download.pytorch.org/whl/cpu"


@pytest.fixture
def folder(tmp_path):
    """A copy of what make reads, and an environment whose pip notes its arguments."""
    for name in ("Makefile", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    own = tmp_path / ".venv" / "bin"
    own.mkdir(parents=True)
    (own / "python").symlink_to(sys.executable)
    (own / "pip").write_text('#!/bin/sh\necho "$@" >> pip.log\n')
    (own / "pip").chmod(0o755)
    return tmp_path


def make(folder, *args):
    given = {"MAKEFLAGS", "TORCH", "TORCH_INDEX", "NVIDIA"}  # what this run's own make was told
    done = subprocess.run(
        ["make", ".venv/.base", *args],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k not in given},
        text=True,
        capture_output=True,
        check=True,
    )
    log = folder / "pip.log"
    return done.stdout, log.read_text().splitlines()[0] if log.exists() else ""


def test_without_an_index_that_answers_pip_chooses(folder):
    said, asked = make(folder, "TORCH_INDEX=http://127.0.0.1:9", "TORCH=torch==2.13.0")
    assert asked == "install --quiet torch==2.13.0"
    assert "http://127.0.0.1:9 cannot be reached: pip chooses" in said


@pytest.mark.parametrize(
    "given, index", [("NVIDIA=", CPU), ("NVIDIA=/dev/nvidia0", ""), ("TORCH_INDEX=", "")]
)
def test_the_index_of_cpu_builds_is_for_machines_without_a_gpu(folder, given, index):
    said, _ = make(folder, "-n", given)
    assert f'index="{index}"' in said
