"""Runs that are gone on from: on the same ranks bit for bit, elsewhere as if nothing had been.

Also from checkpoints of earlier versions, at other stages and on other ranks.
"""

import tarfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_ext.engine import checkpoint_contents, loading, safe_unpickling
from ds_ext.rules import REGISTRY
from tests import worlds
from tests.common import models
from tests.common.choose import params, spread
from tests.common.hypers import CLOSE
from tests.common.ranks import logged, shared_folder
from tests.common.updates import error
from tests.distributed import resume_jobs
from tests.distributed.resume_jobs import (
    KINDS,
    OTHER_BITS,
    STAGES,
    TRAINERS,
    same,
    start,
    steps,
    whole,
)
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
@worlds.on(3)
def test_a_rank_opens_the_first_rank_s_files_and_its_own(stage):
    kind = "flash 8-bit"
    engine, opened = start(kind, stage), []
    for p in list(engine.module.parameters())[::4]:
        p.requires_grad_(False)
    steps(engine, range(2))

    def load(path: Path) -> Any:
        opened.append(path.name)
        return safe_unpickling.load(path)

    with shared_folder() as folder:
        engine.save_checkpoint(folder)
        other = start(kind, stage, seed=8)
        with mock.patch.object(loading, "load", load):
            other.load_checkpoint(folder)
        assert same(whole(engine), whole(other))
    assert len(opened) == len(set(opened))
    states = {name for name in opened if "optim_states" in name}
    own = {0, dist.get_rank()}
    assert states == {f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in own}
    assert len(opened) - len(states) == 1  # with the model


@pytest.mark.parametrize("kind, stage", params([("came", 3), ("adamw", 2), ("galore", 0)], []))
def test_parameters_that_were_frozen_when_saved_keep_their_state(folder, kind, stage):
    """2 -> 3 ranks, 2 -> 1: frozen at the save and one step longer, then trained again."""
    at = folder("frozen", kind, stage)
    whole = worlds.once(2, resume_jobs.frozen, at, kind, stage, range(6))[0]
    for ranks in (3, 1):
        got = worlds.run(ranks, resume_jobs.frozen, at, kind, (stage + 1) % 4, range(3, 6))[0]
        assert error(got["after"], whole["after"], whole["before"]) <= EXACT


def pass_by_pass(engine: Any, numbers: Iterable[int]) -> None:
    for number in numbers:
        engine.backward(engine(models.batch(number, 1)[0], step=number))
        engine.step()


@pytest.mark.parametrize("stage", params(STAGES, [3]))
@worlds.on(2)
def test_a_load_between_micro_batches_drops_the_step_and_says_so(stage):
    whole_step = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    for module_only in (False, True):
        engines = [start("flash 8-bit", stage, 7, **whole_step) for _ in range(2)]
        with shared_folder() as folder, logged() as said:
            engines[0].save_checkpoint(folder)
            pass_by_pass(engines[0], [9])
            for engine in engines:
                engine.load_checkpoint(folder, load_module_only=module_only)
        for engine in engines:
            pass_by_pass(engine, range(2))
        weights = list(map(whole, engines))
        assert same(*weights) and not same(weights[0], whole(start("flash 8-bit", stage, 7)))
        lines = [line for line in said if "unfinished step" in line]
        assert len(lines) == (dist.get_rank() == 0)


@worlds.on(2)
def test_a_load_names_the_hyper_parameters_that_it_changes_and_no_others():
    cycle = {"cycle_min_lr": 1e-3, "cycle_max_lr": 5e-3, "cycle_first_step_size": 4}
    scheduler = {"type": "OneCycle", "params": cycle}  # of betas, too
    first = start("adamw", 2, scheduler=scheduler)
    steps(first, range(2))
    for group in first.optimizer.param_groups:
        group["initial_lr"] = 0.1  # as a scheduler notes it
    with shared_folder() as folder:
        first.save_checkpoint(folder)
        for hypers in ({}, {"eps": 1e-6, "ema_decay": 0.9}):
            engine = start("adamw", 2, hypers=hypers, scheduler=scheduler)
            engine.optimizer.param_groups[0]["initial_lr"] = 0.2 if hypers else 0.1
            with logged() as said:
                engine.load_checkpoint(folder)
            told = [line for line in said if "hyper-parameters" in line]
            assert len(told) == bool(hypers and dist.get_rank() == 0)
            changed = "eps = 1e-08 instead of 1e-06, ema_decay = 0.0 instead of 0.9"
            changed += ", initial_lr = 0.1 instead of 0.2"
            assert all(changed in line for line in told)
        engine = start("adamw", 2)
        engine.lr_scheduler = None
        engine.optimizer.param_groups[0]["lr"] = 0.5
        with logged() as said:
            engine.load_checkpoint(folder, load_lr_scheduler_states=False)
        assert not any("lr = " in line for line in said)  # the saved run had one
        for group in (*first.optimizer.param_groups, *engine.optimizer.param_groups):
            del group["initial_lr"]
        engine.optimizer.param_groups[0]["lr"] = 0.5
        first.save_checkpoint(folder, tag="without")
        with logged() as said:
            engine.load_checkpoint(folder, tag="without", load_lr_scheduler_states=False)
        assert any("lr = " in line for line in said) == (dist.get_rank() == 0)


@pytest.mark.parametrize("stage", params(STAGES, [1]))
@worlds.on(2)
def test_an_unfinished_step_begins_again(stage):
    clip = {"gradient_clipping": 0.5}
    begin = partial(start, "flash 8-bit", stage, **clip)
    loading = [begin(8, gradient_accumulation_steps=2) for _ in range(3)]
    saving = begin(7, gradient_accumulation_steps=2)
    pass_by_pass(saving, range(2))
    trained = begin(7, ds_ext={"clip_mode": "previous"})
    pass_by_pass(trained, range(1))
    clipping = trained.optimizer.fused.clipping
    assert clipping.previous_norm
    made, old = checkpoint_contents.Contents.save, {"accumulated": {"passes": [1, 2]}}
    with shared_folder() as folder, logged() as said:
        with mock.patch.object(checkpoint_contents.Contents, "save", lambda by: made(by) | old):
            saving.save_checkpoint(folder, tag="old")  # as by ds_ext 1.0
        loading[2].load_checkpoint(folder)
        saving.save_checkpoint(folder, tag="step")
        pass_by_pass(saving, range(2, 3))
        saving.save_checkpoint(folder, tag="unfinished")
        loading[0].load_checkpoint(folder, load_optimizer_states=False)
        loading[1].load_checkpoint(folder, load_module_only=True)
        loading[2].load_checkpoint(folder)
        whole_step = begin(8, gradient_accumulation_steps=2)
        whole_step.load_checkpoint(folder, tag="step")
        trained.load_checkpoint(folder, load_optimizer_states=False)
    assert len([x for x in said if "between the micro" in x]) == 2 * (dist.get_rank() == 0)
    assert clipping.previous_norm is None
    assert [engine.micro_steps % 2 for engine in loading] == [0, 0, 0]
    for engine in (*loading, whole_step):
        pass_by_pass(engine, range(2))
    assert same(*map(whole, loading[:2])) and not same(whole(loading[0]), whole(saving))
    assert same(whole(loading[2]), whole(whole_step))
    assert not same(whole(loading[2]), whole(loading[0]))


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


VERSIONS = sorted(path.name.removesuffix(".tar.xz") for path in old_checkpoints.FOLDER.iterdir())
# Ranks, and the stages at which what was saved on two ranks is loaded.
TARGETS = [(2, {"zero3": 1, "zero0": 3}), (1, {"zero3": 2, "zero0": 1})]
# Relative to the update; in bf16 a weight between two values may be rounded to the other one.
CLOSE_TO_OLD = {"zero3": 1e-5, "plain": 1e-5, "zero0": 1e-3, "int8": 0.1}  # by other random bits


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
        limit = CLOSE_TO_OLD["int8" if rule == "int8" else "zero0" if is_half else kind]
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
