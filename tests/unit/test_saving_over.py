"""What else stands in the folder that a checkpoint is saved to stays there."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ds_ext.checkpoint import folder, manifests
from ds_ext.errors import CheckpointError

KEPT = {"tokenizer.json": "tokens", "eval/scores.json": "scores", "eval/deep/er.txt": "deeper"}
KEPT |= {"mp_rank_00_model_states.pt/mine.txt": "a folder with a file's name"}


class Killed(BaseException):
    """The process ends here."""


def manifest(tag: str, steps: int, files: dict[str, dict[str, int]]) -> dict[str, Any]:
    """The manifest of a checkpoint with these files, none of which holds states."""
    said = {"ds_ext": manifests.VERSION, "tag": tag, "global_steps": steps, "files": files}
    return said | {"model_files": [], "state_files": []}


def save(root: Path, tag: str, steps: int, ranks: int = 2) -> None:
    """A checkpoint as engine.save_checkpoint writes it: prepared, written, committed."""
    draft = folder.prepare(root / tag)
    names = [f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(ranks)]
    for name in names:
        (draft.aside / name).write_text(f"{tag} {steps}")
    files = {name: manifests.size_and_checksum(draft.aside / name) for name in names}
    folder.commit(draft, manifest(tag, steps, files), True)
    shutil.rmtree(draft.aside, ignore_errors=True)


def steps_of(root: Path, tag: str) -> int:
    """Of the checkpoint under a tag, whose files are checked."""
    path = root / tag
    said = manifests.read(path)
    manifests.verify(path, said["files"], said["files"])
    return said["global_steps"]


def put(path: Path, files: dict[str, str] = KEPT) -> None:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)


def texts(path: Path) -> set[str]:
    return {file.read_text() for file in (path, *path.rglob("*")) if file.is_file()}


def test_only_files_of_a_checkpoint_are_replaced(tmp_path):
    save(tmp_path, "run", 1, ranks=4)
    put(tmp_path / "run", KEPT)
    save(tmp_path, "run/step1", 2)
    (tmp_path / "run/zero_pp_rank_9_mp_rank_00_optim_states.pt").write_text("DeepSpeed's own")
    save(tmp_path, "run", 3)
    assert steps_of(tmp_path, "run") == 3 and steps_of(tmp_path, "run/step1") == 2
    assert set(KEPT.values()) <= texts(tmp_path / "run")
    assert (tmp_path / "run/eval/deep/er.txt").read_text() == "deeper"
    # Files that zero_to_fp32.py would take for parts of this checkpoint are gone.
    assert len(list((tmp_path / "run").glob("*_optim_states.pt"))) == 2
    assert not list(tmp_path.rglob(".*"))


def test_a_tag_that_is_a_link_stays_one(tmp_path):
    (tmp_path / "disk/here").mkdir(parents=True)
    put(tmp_path / "disk/here")
    (tmp_path / "runs").mkdir()
    link = tmp_path / "runs/best"
    link.symlink_to(os.path.relpath(tmp_path / "disk/here", link.parent))
    for steps in (1, 2):
        save(tmp_path / "runs", "best", steps)
        assert link.is_symlink() and steps_of(tmp_path / "runs", "best") == steps
        assert (tmp_path / "disk/here/tokenizer.json").read_text() == "tokens"
        assert manifests.newest_checkpoint(tmp_path / "runs").steps == steps
    assert os.listdir(tmp_path / "disk") == ["here"]


@pytest.mark.parametrize(
    "tag", ["", ".", "../run", "/run", "a/../../b", "latest", ".incomplete-a", "a/.complete"]
)
def test_a_tag_names_a_folder_inside(tmp_path, tag):
    with pytest.raises(ValueError, match="tag"):
        folder.checkpoint_path(tmp_path, tag)


def test_tags_need_not_be_texts(tmp_path):
    assert folder.checkpoint_path(tmp_path, 0).name == "0"
    assert folder.checkpoint_path(tmp_path, False).name == "False"
    assert folder.checkpoint_path(tmp_path, "run/step1") == tmp_path / "run/step1"


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.rglob(".*")]


def age(root: Path) -> None:
    """Lets temporary folders look as if nobody had written to them for long."""
    for aside in root.rglob(".incomplete-*"):
        for entry in (aside, *aside.iterdir()):
            os.utime(entry, (1e9, 1e9))


def dying(number: int, method):
    """A method that kills the process at the call after so many."""
    left = iter(range(number))

    def call(*args, **kwargs):
        if next(left, None) is None:
            raise Killed
        return method(*args, **kwargs)

    return call


def kill_before(monkeypatch, number: int) -> None:
    """Kills the process before the ``number``-th change of a folder from now on."""
    one = dying(number, lambda: None)

    def counted(method):
        def call(*args, **kwargs):
            one()
            return method(*args, **kwargs)

        return call

    for name in ("rename", "replace", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    for name in ("replace", "unlink", "rmdir", "open", "fsync"):  # also of shutil.rmtree
        monkeypatch.setattr(os, name, counted(getattr(os, name)))


def start(root: Path, kind: str) -> None:
    """A folder with a checkpoint, others below it and other files, under the tag "run"."""
    if kind == "link":
        (root / "disk/here").mkdir(parents=True)
        (root / "run").symlink_to(root / "disk/here")
    save(root, "run", 1, ranks=4)
    put(root / "run")
    save(root, "run/step2", 2)


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_killed_at_any_moment_nothing_is_lost(tmp_path, monkeypatch, kind):
    for number in range(100):
        root = tmp_path / str(number)
        root.mkdir()
        start(root, kind)
        with monkeypatch.context() as patched:
            kill_before(patched, number)
            try:
                save(root, "run", 3)
                killed = False
            except Killed:
                killed = True
        # What was saved is there, and what ``latest`` names is one of the two newest.
        tag = manifests.latest(root)
        assert (tag, steps_of(root, tag)) in {("run/step2", 2), ("run", 3)}
        assert steps_of(root, "run") in (1, 3) and steps_of(root, "run/step2") == 2
        assert manifests.newest_checkpoint(root).steps in (2, 3)
        assert set(KEPT.values()) <= texts(root)
        # The next save brings all of it where it was.
        age(root)
        save(root, "run", 4)
        assert steps_of(root, "run") == 4 and steps_of(root, "run/step2") == 2
        assert set(KEPT.values()) <= texts(root / "run" if kind == "folder" else root / "disk/here")
        assert (root / "run").is_symlink() == (kind == "link")
        assert not list(root.rglob(".*"))
        if not killed:
            break
    assert number > 15 and not killed


def test_the_newest_checkpoint_may_have_a_tag_with_folders(tmp_path, monkeypatch):
    save(tmp_path, "step1", 1)
    save(tmp_path, "run/a/step3", 3)
    assert manifests.latest(tmp_path) == "run/a/step3"
    assert manifests.newest_checkpoint(tmp_path) == (str(tmp_path), "run/a/step3", 3)
    save(tmp_path, "run/step2", 2)
    save(tmp_path, "run", 2)  # around the two others
    assert manifests.newest_checkpoint(tmp_path).tag == manifests.latest(tmp_path) == "run"
    moving_files(monkeypatch, tmp_path, "run", 2, 1)
    assert manifests.newest_checkpoint(tmp_path).tag == manifests.latest(tmp_path) == "run"
    (tmp_path / "latest").unlink()
    assert manifests.newest_checkpoint(tmp_path).tag == "run"
    assert manifests.newest_checkpoint(tmp_path / "run/a").tag == "step3"
    for tag in ("run/step2", "run"):  # as new as each other
        (tmp_path / "latest").write_text(tag)
        assert manifests.newest_checkpoint(tmp_path) == (str(tmp_path), tag, 2)


def test_other_runs_links_and_odd_folders_do_not_confuse_the_newest_checkpoint(tmp_path):
    root = tmp_path / "out"
    save(root / "other run", "step9", 9)  # saved to a folder of its own
    save(tmp_path / "disk", "step4", 4)
    save(root, "step3", 3)
    (root / "all").symlink_to("/")
    (root / "none").symlink_to("missing")
    (root / "a file").write_text("")
    (root / "step3/ds_ext.json.old").mkdir()
    (root / "odd/ds_ext.json").mkdir(parents=True)
    (root / "closed").mkdir(mode=0)
    folder.prepare(root / "step5")
    assert manifests.newest_checkpoint(root) == (str(root), "step3", 3)
    (root / "latest").unlink()
    assert manifests.newest_checkpoint(root) == (str(root), "step3", 3)
    (root / "best").symlink_to(tmp_path / "disk/step4")
    assert manifests.newest_checkpoint(root) == (str(root), "best", 4)


def test_a_checkpoint_that_version_1_0_left_between_two_renames_is_found(tmp_path):
    save(tmp_path, "run", 1)
    (tmp_path / "run").rename(tmp_path / ".replaced-run")
    assert manifests.newest_checkpoint(tmp_path) == (str(tmp_path), ".replaced-run", 1)
    assert steps_of(tmp_path, ".replaced-run") == 1
    assert folder.checkpoint_path(tmp_path, ".replaced-run") == tmp_path / ".replaced-run"


def moving_files(monkeypatch, root: Path, tag: str, steps: int, moved: int) -> None:
    """A save that is killed when so many of its three files have replaced the old ones."""
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", dying(moved, Path.replace))
        with pytest.raises(Killed):
            save(root, tag, steps)


@pytest.mark.parametrize("moved", range(3))
def test_a_killed_move_of_files_is_finished_by_another_job(tmp_path, monkeypatch, moved):
    save(tmp_path, "run", 1, ranks=4)
    put(tmp_path / "run")
    draft = folder.prepare(tmp_path / "run")
    moving_files(monkeypatch, tmp_path, "run", 2, moved)
    # DeepSpeed's tools find no file of the old checkpoint beside those of the new one.
    found = {path.read_text() for path in (tmp_path / "run").glob("*_states.pt") if path.is_file()}
    assert found <= {"run 2"}
    assert steps_of(tmp_path, "run") == 2 and manifests.newest_checkpoint(tmp_path).steps == 2
    folder.commit(draft, manifest("run", 3, {}), True)
    assert steps_of(tmp_path, "run") == 3
    assert texts(tmp_path / "run") - {(tmp_path / "run/ds_ext.json").read_text()} == {
        *KEPT.values()
    }
    save(tmp_path, "run", 4)
    assert steps_of(tmp_path, "run") == 4 and not leftovers(tmp_path)


STATES = "zero_pp_rank_2_mp_rank_00_optim_states.pt"
IN_THE_WAY = [
    ("run", "run is a file"),
    ("run/ds_ext.json/mine", "ds_ext.json is a folder"),
    (f"run/{STATES}/mine", f"{STATES} is a folder"),
    ("run/.complete/ds_ext.json", r"\.complete.ds_ext.json is damaged"),
]


@pytest.mark.parametrize("name, words", IN_THE_WAY)
def test_what_stands_in_the_way_is_refused_before_anything_changes(tmp_path, name, words):
    if not words.startswith(("run is", "ds_ext.json is")):
        save(tmp_path, "run", 1)
    put(tmp_path, {name: "mine"})
    before = texts(tmp_path / "run")
    with pytest.raises(CheckpointError, match=words):
        save(tmp_path, "run", 2, ranks=3)
    assert texts(tmp_path / "run") == before
