"""The library of native passes: built once, kept where only its user writes, never needed."""

import ctypes
import logging
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext.ops.executors import unbatched
from ds_ext.ops.executors.native import library
from ds_ext.ops.executors.native import native_table as native


@pytest.fixture
def unloaded(monkeypatch, tmp_path):
    """A machine where nothing was built yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(library.SWITCH, raising=False)
    library.load.cache_clear()
    yield tmp_path
    library.load.cache_clear()


@pytest.mark.slow
def test_the_library_is_built_once(unloaded, monkeypatch):
    assert library.load() is not None
    (built,) = (unloaded / "ds_ext").iterdir()
    library.load.cache_clear()
    monkeypatch.setattr(library.subprocess, "run", None)
    assert library.load() is not None and built.suffix == ".so"


def test_without_a_compiler_the_torch_ops_serve(unloaded, monkeypatch, caplog):
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    p = nn.Parameter(torch.ones(4, 3))
    p.grad = torch.ones(4, 3)
    with caplog.at_level(logging.INFO, logger="ds_ext"):
        for _ in range(2):
            ds_ext.AdaLomo([p]).step()
    assert len([r for r in caplog.records if "no C++ compiler" in r.message]) == 1
    assert not native.is_available() and (p < 1).all()


def test_a_compiler_that_fails_is_named(unloaded, monkeypatch, caplog):
    monkeypatch.setattr(library, "FLAGS", ("--no-such-option",))
    with caplog.at_level(logging.INFO, logger="ds_ext"):
        assert library.load() is None
    assert "cannot build passes.cpp" in caplog.text and "no-such-option" in caplog.text
    assert list((unloaded / "ds_ext").iterdir()) == []


@pytest.mark.parametrize("stops", [False, True])
def test_any_failure_of_a_compiler_leaves_the_torch_ops(unloaded, monkeypatch, caplog, stops):
    compiler = unloaded / "compiler"
    compiler.write_text("#!/bin/sh\nprintf 'd\\351j\\340' >&2; exit 1\n")  # Latin-1
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    if stops:
        monkeypatch.setattr(library, "_build", mock.Mock(side_effect=ValueError("d\ufffdj\ufffd")))
    with caplog.at_level(logging.INFO, logger="ds_ext"):
        assert library.load() is None
    assert "PyTorch operations step on the CPU" in caplog.text and "d\ufffdj\ufffd" in caplog.text


def test_it_is_switched_off_by_the_environment(unloaded, monkeypatch):
    monkeypatch.setenv(library.SWITCH, "0")
    assert library.load() is None


@pytest.fixture
def builds(monkeypatch, tmp_path):
    """An empty cache, and a compiler that copies this machine's library: its commands so far."""
    content, commands = Path(library.load()._name).read_bytes(), []

    def build(command, **_):
        commands.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(content)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(library.subprocess, "run", build)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return commands


@pytest.mark.parametrize("kind", ["no home", "read-only folder", "no folder can be made"])
def test_where_no_cache_can_be_written_a_temporary_folder_serves(
    builds, monkeypatch, tmp_path, kind
):
    if kind == "no home":  # and no entry of the user
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: Path("~").expanduser())
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    elif kind == "read-only folder":
        (tmp_path / "ds_ext").symlink_to("/proc/self")
    else:
        (tmp_path / "ds_ext").write_text("a file")
    built = library._built()
    assert built.is_file() and built.is_relative_to(tempfile.gettempdir())
    assert ctypes.CDLL(str(built)).passes_entry_bytes() == native.ENTRY.itemsize
    shutil.rmtree(built.parent)


@pytest.mark.parametrize(
    "kind", ["cut short", "empty", "edited", "of another user", "writable by others"]
)
def test_a_library_that_may_not_be_ours_is_built_again(builds, kind):
    """Loading a file that was cut short would end this process."""
    path = library._built()
    content = path.read_bytes()
    assert library._built() == path and len(builds) == 1
    if kind == "of another user":
        if os.getuid():
            pytest.skip("only root can give a file away")
        os.chown(path, 65534, 65534)
    elif kind == "writable by others":
        path.chmod(0o775)
    else:
        damaged = {"cut short": content[: len(content) // 2], "empty": b""}
        path.write_bytes(damaged.get(kind, content[:99] + b"?" + content[100:]))
    assert library._built() == path and len(builds) == 2
    assert path.read_bytes() == content
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (os.getuid(), 0o755)
    assert list(path.parent.iterdir()) == [path]


def test_in_a_shared_cache_each_user_has_a_folder(builds, tmp_path):
    shared = tmp_path / "ds_ext"
    shared.mkdir()
    shared.chmod(0o777)
    path = library._built()
    assert path.parent == shared / f"user-{os.getuid()}" and library._built() == path
    assert len(builds) == 1 and path.parent.stat().st_mode & 0o777 == 0o700


def test_all_ranks_step_without_native_code_if_one_has_none(monkeypatch, caplog):
    monkeypatch.setenv(library.SWITCH, "1")  # restored at the end
    p = nn.Parameter(torch.ones(4, 3))
    p.grad = torch.ones(4, 3)
    optimizer = ds_ext.AdaLomo([p])
    optimizer.step()
    assert optimizer._plans and native.is_available()
    try:
        with caplog.at_level(logging.WARNING, logger="ds_ext"):
            optimizer.agree_on_executor(p.device, lambda flag: True)  # of another rank
        assert "another rank steps by PyTorch's operations" in caplog.text
        assert not native.is_available() and not optimizer._plans
        optimizer.step()
    finally:
        unbatched._set({})  # forgets what was chosen without native code
