"""Checkpoints of earlier versions load at other stages and on other ranks, and training goes on."""

import tarfile

import pytest
import torch

from ds_ext.rules import REGISTRY
from tests import worlds
from tests.common.choose import params, spread
from tests.common.updates import error
from tests.tools import old_checkpoints

VERSIONS = sorted(path.name.removesuffix(".tar.xz") for path in old_checkpoints.FOLDER.iterdir())
# Ranks, and the stages at which what was saved on two ranks is loaded.
TARGETS = [(2, {"zero3": 1, "zero0": 3}), (1, {"zero3": 2, "zero0": 1})]
# Relative to the update; in bf16 a weight between two values may be rounded to the other one.
CLOSE = {"zero3": 1e-5, "plain": 1e-5, "zero0": 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a version's archive, unpacked."""
    base = tmp_path_factory.mktemp("old")
    for version in VERSIONS:
        with tarfile.open(old_checkpoints.FOLDER / f"{version}.tar.xz") as file:
            file.extractall(base / version, filter="data")
    return lambda version: base / version


def compare(path, found):
    for (rule, kind), (loaded, after) in found.items():
        record = torch.load(path / rule / f"{kind}.weights.pt")
        assert all(torch.equal(loaded[name], w) for name, w in record["saved"].items()), rule
        is_half = record["saved"]["matrix"].dtype != torch.float32
        limit = CLOSE["zero0" if is_half else kind]
        assert error(after, record["after"], record["saved"]) <= limit, (rule, kind)


ALL = [(version, *target) for version in VERSIONS for target in TARGETS]


@pytest.mark.parametrize("version, ranks, stages", params(ALL, [*spread(VERSIONS, TARGETS)]))
def test_engines_load_checkpoints_of_earlier_versions(folder, version, ranks, stages):
    first, *others = worlds.run(ranks, old_checkpoints.load_on_ranks, str(folder(version)), stages)
    assert len(first) == len(list(folder(version).glob("*/zero?.weights.pt")))
    for found in (first, *others):
        compare(folder(version), found)


@pytest.mark.parametrize("version", VERSIONS)
def test_plain_pytorch_loads_checkpoints_of_earlier_versions(folder, version):
    compare(folder(version), old_checkpoints.load_plain(str(folder(version))))


def test_every_optimizer_and_state_is_in_an_archive(folder):
    assert "0.1.0" in VERSIONS
    assert {path.name for version in VERSIONS for path in folder(version).iterdir()} == {
        *REGISTRY,
        *old_checkpoints.STATES,
    }
