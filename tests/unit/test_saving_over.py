"""What else stands in the folder that a checkpoint is saved to stays there."""

import os
from pathlib import Path

import pytest

from ds_ext.checkpoint import folder

KEPT = {
    "tokenizer.json": "tokens",
    "eval/scores.json": "scores",
    "eval/deep/er.txt": "deeper",
    "mp_rank_00_model_states.pt/mine.txt": "a folder with a file's name",
}


class Killed(BaseException):
    """The process ends here."""


def save(root: Path, tag: str, steps: int, ranks: int = 2) -> None:
    """A checkpoint as engine.save_checkpoint writes it: prepared, written, committed."""
    path = root / tag
    folder.prepare(path)
    aside = folder.incomplete(path)
    names = [f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(ranks)]
    for name in names:
        (aside / name).write_text(f"{tag} {steps}")
    files = {name: folder.describe(aside / name) for name in names}
    said = {"ds_ext": folder.VERSION, "tag": tag, "global_steps": steps, "files": files}
    folder.commit(path, said, True)


def steps_of(root: Path, tag: str) -> int:
    """Of the checkpoint under a tag, whose files are checked."""
    path = folder.find(root, tag)
    said = folder.manifest(path)
    assert said is not None
    folder.verify(path, said["files"], said["files"])
    return said["global_steps"]


def put(path: Path, files: dict[str, str] = KEPT) -> None:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)


def texts(path: Path) -> set[str]:
    """What all files below a folder hold."""
    return {file.read_text() for file in path.rglob("*") if file.is_file()}


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


def test_a_folder_that_never_held_a_checkpoint_is_kept_too(tmp_path):
    put(tmp_path / "run")
    save(tmp_path, "run", 1)
    assert steps_of(tmp_path, "run") == 1 and set(KEPT.values()) <= texts(tmp_path / "run")


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
        assert folder.newest_checkpoint(tmp_path / "runs").steps == steps
    assert os.listdir(tmp_path / "disk") == ["here"]


def test_a_file_is_not_replaced_by_a_checkpoint(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(folder.CheckpointError, match="run is a file"):
        folder.prepare(tmp_path / "run")
    assert texts(tmp_path) == {"mine"}


@pytest.mark.parametrize("tag", ["", ".", "../run", "/run", "a/../../b", "latest", ".replaced-a"])
def test_a_tag_names_a_folder_inside(tmp_path, tag):
    with pytest.raises(ValueError, match="tag"):
        folder.path_of(tmp_path, tag)


def test_tags_need_not_be_texts(tmp_path):
    assert folder.path_of(tmp_path, 0).name == "0"
    assert folder.path_of(tmp_path, False).name == "False"
    assert folder.path_of(tmp_path, "run/step1") == tmp_path / "run/step1"


MOVES = ("rename", "replace", "unlink", "rmdir", "mkdir")


def kill_before(monkeypatch, number: int) -> None:
    """Kills the process before the ``number``-th change of a folder from now on."""
    left = number

    def dying(method):
        def call(*args, **kwargs):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return method(*args, **kwargs)

        return call

    for name in MOVES:
        monkeypatch.setattr(Path, name, dying(getattr(Path, name)))
    monkeypatch.setattr(os, "replace", dying(os.replace))


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
        tag = folder.latest(root)
        assert (tag, steps_of(root, tag)) in {("run/step2", 2), ("run", 3)}
        assert steps_of(root, "run") in (1, 3) and steps_of(root, "run/step2") == 2
        assert folder.newest_checkpoint(root).steps in (1, 3)
        assert set(KEPT.values()) <= texts(root)
        # The next save brings all of it where it was.
        save(root, "run", 4)
        assert steps_of(root, "run") == 4 and steps_of(root, "run/step2") == 2
        assert set(KEPT.values()) <= texts(root / "run" if kind == "folder" else root / "disk/here")
        assert (root / "run").is_symlink() == (kind == "link")
        assert not list(root.rglob(".*"))
        if not killed:
            break
    assert number > 15 and not killed
