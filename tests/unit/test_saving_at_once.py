"""Saves of several jobs at once, of jobs that are killed, and what they leave in a folder."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from ds_ext.checkpoint import folder, manifests
from tests.common.choose import params
from tests.unit.test_saving_over import KEPT, age, leftovers, manifest, save, start, steps_of, texts


@pytest.mark.parametrize("tag", ["first", "second"])
def test_another_job_does_not_touch_what_a_job_writes(tmp_path, tag):
    first = folder.prepare(tmp_path / "first")
    (first.aside / "file.pt").write_text("first")
    save(tmp_path, tag, 2)
    files = {"file.pt": manifests.size_and_checksum(first.aside / "file.pt")}
    folder.commit(first, manifest("first", 1, files), True)
    assert steps_of(tmp_path, "first") == 1 and steps_of(tmp_path, tag) in (1, 2)
    assert manifests.latest(tmp_path) == "first" and not leftovers(tmp_path)


def killed_in_a_save(root: Path) -> None:
    """Another process, killed while it writes a checkpoint."""
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    try:
        draft = folder.prepare(root / "killed")
        (draft.aside / "layer_00-model_states.pt").write_text("half")
        (draft.aside / "a folder").mkdir()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_job_left_is_cleared(tmp_path):
    killed_in_a_save(tmp_path)
    assert len(leftovers(tmp_path)) == 1
    age(tmp_path)
    save(tmp_path, "run", 1)
    assert not leftovers(tmp_path)


def test_only_what_rests_for_half_an_hour_is_cleared(tmp_path):
    draft = folder.prepare(tmp_path / "live")
    file = draft.aside / "file.pt"
    file.write_text("live")
    save(tmp_path, "run", 1)
    assert file.exists()
    age(tmp_path)
    os.utime(file)  # one rank writes
    save(tmp_path, "run", 2)
    assert file.exists()
    os.utime(file, (1e9, 1e9))
    save(tmp_path, "run", 3)
    assert not leftovers(tmp_path) and steps_of(tmp_path, "run") == 3


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
def test_a_job_killed_at_random_moments_loses_nothing(tmp_path, kind, request):
    chance = random.Random(0)
    start(tmp_path, kind)
    last = 1
    for number in range(5 * request.config.getoption("kills")):
        first = 10**7 * (number + 1)
        job = saves_without_end(tmp_path, first)
        time.sleep(chance.uniform(0, 0.05))
        returned = kill(*job)
        found = steps_of(tmp_path, "run")
        assert found >= first or (found == last and not returned)
        assert found not in returned[:-1]
        assert steps_of(tmp_path, "run/step2") == 2 and set(KEPT.values()) <= texts(tmp_path)
        last = first - 1
        age(tmp_path)
        save(tmp_path, "run", last)
        assert steps_of(tmp_path, "run") == last and steps_of(tmp_path, "run/step2") == 2
        assert set(KEPT.values()) <= texts((tmp_path / "run").resolve())
        assert (tmp_path / "run").is_symlink() == (kind == "link") and not leftovers(tmp_path)
