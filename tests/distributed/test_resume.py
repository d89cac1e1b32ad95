"""Runs that are gone on from: on the same ranks bit for bit, elsewhere as if nothing had been.

Also from checkpoints of earlier versions, at other stages and on other ranks.
"""

import tarfile

import pytest
import torch

from ds_ext.rules import REGISTRY
from tests import worlds
from tests.common.choose import params, spread
from tests.common.hypers import CLOSE
from tests.common.updates import error
from tests.distributed import resume_jobs
from tests.distributed.resume_jobs import KINDS, OTHER_BITS, STAGES, TRAINERS, same
from tests.tools import old_checkpoints

EXACT = 1e-6  # of the update of the whole model
# What `make test` runs: each kind of state at one stage.
QUICK = [("adafactor", 0), ("flash 8-bit", 1), ("galore 8-bit", 2), ("came 8-bit", 3)]
QUICK_ELSEWHERE = [("galore 8-bit", 2)]
# A run is saved or loaded at all four stages, wherever it begins. Each kind begins at one.
ELSEWHERE = [("galore 8-bit", 2), ("apollo", 0)]
ELSEWHERE += [(kind, i % 4) for i, kind in enumerate(KINDS) if kind not in dict(ELSEWHERE)]
QUICK_BITS = [("fp32", *case) for case in QUICK]
QUICK_BITS += [("master", "galore 8-bit", 2)]
QUICK_BITS += [(way, "flash 8-bit", 3) for way in ("clipped by the step before", "loss scale")]


def optimizer(kind: str) -> str:
    return KINDS[kind][0]


# Beside what begins there elsewhere, each kind at one more stage: elsewhere, it is loaded at all.
IN_BITS = [("fp32", *case) for case in ELSEWHERE]
IN_BITS += [("fp32", kind, (stage + 3) % 4) for kind, stage in ELSEWHERE]
IN_BITS = list(dict.fromkeys(IN_BITS + QUICK_BITS + OTHER_BITS))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """For each run a folder that all of its worlds share."""
    base = tmp_path_factory.mktemp("resume")
    return lambda *names: str(base / " ".join(map(str, names)))


@pytest.mark.supports("save and resume, bit-identical", stage="stage", optimizer=optimizer)
@pytest.mark.parametrize("way, kind, stage", params(IN_BITS, QUICK_BITS))
def test_gone_on_from_on_the_same_ranks_bit_for_bit(folder, way, kind, stage):
    at = folder(kind, stage) if way == "fp32" else folder(way, kind, stage)
    worlds.once(2, resume_jobs.write, at, kind, stage, way)


@pytest.mark.supports(
    "resume with other ranks and ZeRO stage", stage=lambda stage: [*STAGES], optimizer=optimizer
)
@pytest.mark.parametrize("kind, stage", params(ELSEWHERE, QUICK_ELSEWHERE))
def test_gone_on_from_on_another_number_of_ranks_and_stage(folder, kind, stage):
    """2 -> 3 -> 1 ranks, each at another stage; 2 -> 2."""
    two, three = folder(kind, stage), folder(kind, stage, "on three")
    whole = worlds.once(2, resume_jobs.write, two, kind, stage, "fp32")[0]

    def on(ranks, source, target, shift, numbers):
        return worlds.run(
            ranks, resume_jobs.elsewhere, source, target, kind, (stage + shift) % 4, numbers
        )

    first, *others = on(3, two, three, 1, range(3, 4))
    assert all(same(first, other) for other in others)
    one = on(1, three, folder(kind, stage, "on one"), 2, range(4, 5))
    again = on(2, two, folder(kind, stage, "again"), 3, range(3, 5))
    for got in (one, again):
        close = CLOSE.get(kind, 10 * EXACT) / 10
        assert error(got[0], whole["after"], whole["before"]) <= close


@pytest.mark.parametrize("stage", params([2, 3], [3]))
def test_a_rank_opens_the_first_rank_s_files_and_its_own(stage):
    worlds.run(3, resume_jobs.opened_files, "flash 8-bit", stage)


@pytest.mark.parametrize("kind, stage", params([("came", 3), ("adamw", 2), ("galore", 0)], []))
def test_parameters_that_were_frozen_when_saved_keep_their_state(folder, kind, stage):
    """2 -> 3 ranks, 2 -> 1: frozen at the save and one step longer, then trained again."""
    at = folder("frozen", kind, stage)
    whole = worlds.once(2, resume_jobs.frozen, at, kind, stage, range(6))[0]
    for ranks in (3, 1):
        got = worlds.run(ranks, resume_jobs.frozen, at, kind, (stage + 1) % 4, range(3, 6))[0]
        assert error(got["after"], whole["after"], whole["before"]) <= EXACT


@pytest.mark.parametrize("stage", params(STAGES, [3]))
def test_a_load_between_micro_batches_drops_the_step_and_says_so(stage):
    worlds.run(2, resume_jobs.load_over, stage)


def test_a_load_names_the_hyper_parameters_that_it_changes():
    worlds.run(2, resume_jobs.other_hypers, 2)


@pytest.mark.parametrize("stage", params(STAGES, [1]))
def test_an_unfinished_step_begins_again(stage):
    worlds.run(2, resume_jobs.unfinished_step, stage)


@pytest.mark.supports(
    "HF Trainer's resume",
    stage=lambda name: TRAINERS[name],
    optimizer=lambda name: name.split()[-1],
)
@pytest.mark.parametrize("name", params(TRAINERS, []))
def test_hf_trainer_resumes_unchanged(folder, name):
    two = worlds.once(2, resume_jobs.trainer, folder("trainer", name), name, "write")
    for got in two:
        assert same(got["first"], got["second"])
        assert got["steps"] == list(range(1, 9))
    (one,) = worlds.once(1, resume_jobs.trainer, folder("trainer", name), name, "one")
    off = error(one["second"], two[0]["first"], two[0]["before"])  # of twice the batch
    # Small steps: next to the weights' own resolution in fp32, 1e-6 of such an update.
    assert off <= 2 * EXACT


# Checkpoints of earlier versions.

VERSIONS = sorted(path.name.removesuffix(".tar.xz") for path in old_checkpoints.FOLDER.iterdir())
# Ranks, and the stages at which what was saved on two ranks is loaded.
TARGETS = [(2, {"zero3": 1, "zero0": 3}), (1, {"zero3": 2, "zero0": 1})]
# Relative to the update; in bf16 a weight between two values may be rounded to the other one.
CLOSE_TO_OLD = {"zero3": 1e-5, "plain": 1e-5, "zero0": 1e-3}


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
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
        limit = CLOSE_TO_OLD["zero0" if is_half else kind]
        assert error(after, record["after"], record["saved"]) <= limit, (rule, kind)


OLD = [(version, *target) for version in VERSIONS for target in TARGETS]


@pytest.mark.parametrize("version, ranks, stages", params(OLD, [spread(VERSIONS, TARGETS)[1]]))
def test_engines_load_checkpoints_of_earlier_versions(archive, version, ranks, stages):
    first, *others = worlds.run(ranks, old_checkpoints.load_on_ranks, str(archive(version)), stages)
    assert len(first) == len(list(archive(version).glob("*/zero?.weights.pt")))
    for found in (first, *others):
        compare(archive(version), found)


@pytest.mark.parametrize("version", VERSIONS)
def test_plain_pytorch_loads_checkpoints_of_earlier_versions(archive, version):
    compare(archive(version), old_checkpoints.load_plain(str(archive(version))))


def test_every_optimizer_and_state_is_in_an_archive(archive):
    assert "0.1.0" in VERSIONS
    assert {path.name for version in VERSIONS for path in archive(version).iterdir()} == {
        *REGISTRY,
        *old_checkpoints.STATES,
    }
