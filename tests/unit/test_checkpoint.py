"""What is saved and how it is read: pieces, not wholes. (Real ranks: test_resume.py.) Saves of
several jobs at once, of jobs that are killed, and what they leave in a folder.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

import ds_ext
from ds_ext.checkpoint import checks, folder, manifests, resharding
from ds_ext.checkpoint.pieces import Files, Pieces, piece
from ds_ext.distributed import consensus
from ds_ext.errors import CheckpointError
from ds_ext.ops.state import Part
from ds_ext.optimizer.selftest import Alone
from ds_ext.planner.live_memory import LiveMemory
from tests.common import optimizer_ranks
from tests.common.choose import params
from tests.unit.test_saving_over import KEPT, age, leftovers, manifest, save, start, steps_of, texts

SHAPE = (2048, 4608)


def stepped(values, world):
    """Ranks after a step by gradients that equal the weights."""
    ranks = optimizer_ranks.made(ds_ext.CAME, values, world)
    for rank in ranks:
        rank.optimizer.update(rank.updates(values), Alone())
    return ranks


def test_a_rank_reads_its_part_and_no_more(tmp_path):
    (one,), world = stepped([torch.randn(SHAPE)], 1), 8
    torch.save(resharding.save(one.optimizer, one.owned), tmp_path / "saved.pt")
    size = one.runs[0].nbytes
    expected = one.runs[0], one.optimizer.state[one.params[0]]["m"]
    part = optimizer_ranks.made(ds_ext.CAME, [torch.zeros(SHAPE)], world)[3]
    saved = torch.load(tmp_path / "saved.pt", mmap=True, weights_only=True)
    mapped = [x for x in tree_leaves(saved) if isinstance(x, torch.Tensor)]
    with LiveMemory(mapped) as watch:
        before = watch.now
        checks.check(Pieces([saved]), part.optimizer, part.owned, True)
        resharding.load_state(Pieces([saved]), part.optimizer, part.owned)
        resharding.load_weights(Pieces([saved]), part.optimizer, part.owned)
        read = watch.most - before
        # The watch does see a whole tensor that is read.
        Pieces([saved]).read(Part.of(slice(0, size // 4), size // 4), "weights", "0").clone()
    cut = slice(part.shards[0].start, part.shards[0].stop)
    assert torch.equal(part.runs[0], expected[0][cut])
    assert torch.equal(part.optimizer.state[part.params[0]]["m"], expected[1][cut])
    # Of weights and momentum, and the state that the momentum goes to; 2 · size are all.
    assert read < 3 * size / world + 2**21
    assert watch.most - before >= size


def many():
    """30 parameters, of which small ones are cut finely."""
    shapes = [(i + 64, 70) if i % 3 else (640 * i + 10,) for i in range(30)]
    drawn = [torch.Generator().manual_seed(i) for i in range(30)]
    return [torch.randn(s, generator=g) for s, g in zip(shapes, drawn, strict=True)]


@pytest.fixture(scope="module")
def saved_by_64():
    return [resharding.save(rank.optimizer, rank.owned) for rank in stepped(many(), 64)]


@pytest.mark.parametrize("world", [64, 128, 32, 7])
def test_a_rank_opens_only_the_files_that_its_pieces_are_in(saved_by_64, world):
    names = {str(i) for i in range(30)}
    index = {"weights": names, "state": names}
    ranks = optimizer_ranks.made(ds_ext.CAME, [torch.zeros_like(p) for p in many()], world)
    everything = Pieces(Files(range(64), lambda r: saved_by_64[r]))
    for number in (0, 1, world // 2, world - 1):
        opened = []

        def load(r, opened=opened):
            opened.append(r)
            return saved_by_64[r]

        pieces = Pieces(Files(range(64), load), index, [], number / world)
        optimizer, own = ranks[number].optimizer, ranks[number].owned
        checks.check(pieces, optimizer, own, True)
        resharding.load_state(pieces, optimizer, own)
        assert not resharding.load_weights(pieces, optimizer, own)
        assert pieces.first("weights", "30") is None
        assert len(opened) == len(set(opened))
        if world == 64:  # its own, and the states that all ranks need
            assert set(opened) == {number, *range(resharding.WRITERS)}
        assert len(opened) <= 64 // world + 12 + resharding.WRITERS
        assert len(optimizer.state) == 30
        for run in own.values():
            assert torch.equal(run.run, everything.read(run.part, "weights", run.name))


def test_a_checkpoint_without_names_is_read_by_opening_all_files(saved_by_64):
    opened = []
    pieces = Pieces(Files(range(64), lambda r: opened.append(r) or saved_by_64[r]))
    rank = optimizer_ranks.made(ds_ext.CAME, many(), 64)[3]
    checks.check(pieces, rank.optimizer, rank.owned, True)
    assert sorted(opened) == list(range(64))


@pytest.mark.parametrize("name", ["weights", "state"])
def test_a_parameter_may_have_the_name_of_a_section(name):
    def saved(value):
        return piece(torch.full((4,), value), Part.of(slice(0, 4), 4))

    stepped = [{"weights": {name: saved(1.0)}, "state": {"other": {name: saved(2.0)}}}]
    index = {"weights": {name}, "state": {"other"}}
    pieces = Pieces(stepped, index, [{"weights": {"frozen": saved(3.0)}}])
    assert pieces.first("weights", "frozen")["values"].eq(3).all()
    assert pieces.first("weights", name)["values"].eq(1).all()
    assert pieces.first("state", "other", name)["values"].eq(2).all()
    assert pieces.first("state", name) is None


@pytest.mark.parametrize("first, second", [((0, 5), (5, 9)), ((0, 6), (4, 9)), ((3, 9), (0, 4))])
def test_pieces_may_overlap_and_come_in_any_order(first, second):
    whole = torch.arange(9.0)
    saved = [{"x": piece(whole[a:b], Part.of(slice(a, b), 9))} for a, b in (first, second)]
    for begin in range(9):
        for stop in range(begin, 10):
            part = Part.of(slice(begin, stop), 9)
            Pieces(saved).require(part, "x", "x")
            assert torch.equal(Pieces(saved).read(part, "x"), whole[begin:stop])


def test_a_gap_between_pieces_is_seen():
    whole = torch.arange(9.0)
    saved = [{"x": piece(whole[a:b], Part.of(slice(a, b), 9))} for a, b in ((0, 4), (5, 9))]
    pieces = Pieces(saved)
    pieces.require(Part.of(slice(5, 9), 9), "x", "x")
    for part in (Part.of(slice(3, 6), 9), Part.of(slice(0, 4), 8)):  # the second of another total
        with pytest.raises(CheckpointError, match="elements of x are missing"):
            pieces.require(part, "x", "x")


def test_the_newest_checkpoint_is_complete_undamaged_and_trainers_own(tmp_path):
    assert manifests.newest_checkpoint(tmp_path) is None
    for steps in (9, 10, 30):
        save(tmp_path, f"global_step{steps}", steps)
    assert manifests.newest_checkpoint(tmp_path).steps == 30
    assert manifests.latest(tmp_path) == "global_step30"
    next((tmp_path / "global_step30").glob("*.pt")).write_text("damaged")
    assert manifests.newest_checkpoint(tmp_path) == (str(tmp_path), "global_step10", 10)
    save(tmp_path / "checkpoint-40", "global_step40", 40)  # HF Trainer killed before it was done
    assert manifests.newest_checkpoint(tmp_path).steps == 10
    (tmp_path / "checkpoint-40" / "trainer_state.json").write_text("{}")
    inner = str(tmp_path / "checkpoint-40")
    assert manifests.newest_checkpoint(tmp_path) == (inner, "global_step40", 40)
    save(tmp_path, "global_step9", 11)  # in the place of the one before
    assert not list(tmp_path.glob(".*"))
    assert manifests.newest_checkpoint(tmp_path / "global_step9") is None


def test_checkpoints_of_trainer_without_deepspeed_are_not_taken_for_none(tmp_path):
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10" / "optimizer.pt").write_text("")
    with pytest.raises(ValueError, match="get_last_checkpoint"):
        manifests.newest_checkpoint(tmp_path)
    save(tmp_path, "global_step9", 9)
    assert manifests.newest_checkpoint(tmp_path).steps == 9


def test_the_first_difference_is_named():
    assert consensus._difference({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}) == "a.b[1]: 2 and 3"
    assert consensus._difference({"a": 1}, {"a": 1, "c": 2}) == "c: None and 2"
    assert consensus._difference([1], [1, 2], "x") == "x: 1 and 2"


@pytest.mark.parametrize("tag", ["first", "second"])
def test_another_job_does_not_touch_what_a_job_writes(tmp_path, tag):
    first = folder.prepare(tmp_path / "first")
    (first.aside / "file.pt").write_text("first")
    save(tmp_path, tag, 2)
    files = {"file.pt": manifests.size_and_checksum(first.aside / "file.pt")}
    folder.commit(first, manifest("first", 1, files), True)
    assert steps_of(tmp_path, "first") == 1 and steps_of(tmp_path, tag) in (1, 2)
    assert manifests.latest(tmp_path) == "first" and not leftovers(tmp_path)


def test_only_what_rests_for_half_an_hour_is_cleared(tmp_path):
    draft = folder.prepare(tmp_path / "live")
    file = draft.aside / "file.pt"
    file.write_text("live")
    (draft.aside / "a folder").mkdir()
    save(tmp_path, "run", 1)
    assert file.exists()
    age(tmp_path)
    os.utime(file)  # one rank writes
    save(tmp_path, "run", 2)
    assert file.exists()
    os.utime(file, (1e9, 1e9))
    save(tmp_path, "run", 3)
    assert not leftovers(tmp_path) and steps_of(tmp_path, "run") == 3


def test_a_job_that_hangs_while_it_moves_files_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "SECONDS", 0.05)
    with folder.locked(tmp_path), pytest.raises(CheckpointError, match="has moved files in"):
        save(tmp_path, "run", 1)
    save(tmp_path, "run", 1)
    assert steps_of(tmp_path, "run") == 1


def test_a_process_that_was_forked_in_a_save_holds_no_lock(tmp_path):
    reading, writing = os.pipe()
    with folder.locked(tmp_path):
        if not (pid := os.fork()):
            os.read(reading, 1)
            os._exit(0)
    with folder.locked(tmp_path):
        os.write(writing, b".")
    os.waitpid(pid, 0)


def saves_without_end(root: Path, first: int) -> tuple[int, int]:
    """Starts a process that saves one checkpoint after another -> its number, and a pipe of steps.

    The pipe holds the steps of each save that has returned, eight bytes for each.
    """
    reading, writing = os.pipe()
    if pid := os.fork():
        os.close(writing)
        return pid, reading
    try:
        for steps in range(first, first + 10**6):
            save(root, "run", steps)
            os.write(writing, steps.to_bytes(8, "little"))
    finally:
        os._exit(1)


def kill(pid: int, reading: int) -> list[int]:
    """Kills a process of ``saves_without_end`` -> the steps of its saves that have returned."""
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "a save failed without a kill"
    with open(reading, "rb") as file:
        told = file.read()
    return [int.from_bytes(told[i : i + 8], "little") for i in range(0, len(told), 8)]


@pytest.mark.soak
@pytest.mark.parametrize("kind", params(["folder", "link"], ["link"]))
def test_two_jobs_killed_at_random_moments_lose_nothing(tmp_path, kind, request):
    chance = random.Random(0)
    start(tmp_path, kind)
    last = 1
    for number in range(5 * request.config.getoption("kills")):
        first = 10**7 * (number + 1)
        jobs = [saves_without_end(tmp_path, first + 10**6 * job) for job in (1, 2)]
        time.sleep(chance.uniform(0, 0.05))
        returned = []
        for job in jobs:
            time.sleep(chance.uniform(0, 0.005))
            returned.append(kill(*job))
        found = steps_of(tmp_path, "run")
        assert found >= first or (found == last and not any(returned))
        assert not any(found in steps[:-1] for steps in returned)
        assert steps_of(tmp_path, "run/step2") == 2 and set(KEPT.values()) <= texts(tmp_path)
        last = first - 1
        age(tmp_path)
        save(tmp_path, "run", last)
        assert steps_of(tmp_path, "run") == last and steps_of(tmp_path, "run/step2") == 2
        assert set(KEPT.values()) <= texts((tmp_path / "run").resolve())
        assert (tmp_path / "run").is_symlink() == (kind == "link") and not leftovers(tmp_path)
