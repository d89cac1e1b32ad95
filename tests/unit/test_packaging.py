"""What is installed: every module, type information, the license; and one version."""

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import ds_ext

ROOT = Path(__file__).parents[2]
SOURCES = ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")


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
    assert metadata["Version"] == ds_ext.__version__
    assert "Apache-2.0" in (metadata["License-Expression"] or metadata["License"])
    assert "Apache License" in next(info.rglob("LICENSE")).read_text()
    for name in ("LOMO", "AdaLomo", "Adafactor", "CAME", "LAMB", "GaLore"):
        assert name in metadata["Summary"]


def test_the_wheel_works_where_the_source_is_not(wheel):
    code = (
        "import ds_ext, torch; layer = torch.nn.Linear(2, 2); "
        "optimizer = ds_ext.AdaLomo(layer.parameters(), lr=0.1); "
        "ds_ext.fuse_into_backward(layer, optimizer); "
        "layer(torch.ones(1, 2)).sum().backward(); optimizer.step(); print(ds_ext.__file__)"
    )
    own = {"PYTHONPATH": str(wheel), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=wheel.parent.parent,
        env=os.environ | own,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(wheel / "ds_ext/__init__.py")
