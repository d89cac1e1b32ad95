"""The library of native passes: built once, kept where only its user writes, never needed. Passes
beside threads, interrupts and forked processes."""

import ctypes
import itertools
import json
import logging
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext.ops.executors import unbatched
from ds_ext.ops.executors.native import library
from ds_ext.ops.executors.native import native_table as native
from tests.common import paths
from tests.common.plain import fuse


@pytest.fixture
def unloaded(monkeypatch, tmp_path):
    """A machine where nothing was built yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(library.SWITCH, raising=False)
    library.load.cache_clear()
    yield tmp_path
    library.load.cache_clear()


def test_without_a_compiler_the_torch_ops_serve(unloaded, monkeypatch, caplog):
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    p = nn.Parameter(torch.ones(4, 3))
    p.grad = torch.ones(4, 3)
    with caplog.at_level(logging.INFO, logger="ds_ext"):
        for _ in range(2):
            ds_ext.AdaLomo([p]).step()
    assert len([r for r in caplog.records if "no C++ compiler" in r.message]) == 1
    assert not native.is_available() and (p < 1).all()


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
    assert ("cannot build passes.cpp" in caplog.text) != stops
    assert not list((unloaded / "ds_ext").glob("*"))


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


def test_small_numbers_are_flushed_in_all_threads_or_none():
    n = 64 * 2**17  # strips for all threads
    with paths.threads(4):
        p = nn.Parameter(torch.zeros(n))
        p.grad = torch.full((n,), 2e-39)  # denormal
        optimizer = ds_ext.LOMO([p], lr=1.0)
        for flush in (False, True, False):  # the threads are there from the first step on
            with torch.no_grad():
                p.zero_()
            torch.set_flush_denormal(flush)
            optimizer.step()
            expected = -p.grad[:1].mul(1.0)  # by torch, in this thread
            torch.set_flush_denormal(False)
            assert bool(expected == 0) == flush and (p == expected).all()


COUNTS = """
import json, os
import torch
from torch import nn
import ds_ext

def threads() -> int:
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(1)
p = nn.Parameter(torch.zeros(2**23))
p.grad = torch.ones_like(p)
ds_ext.LOMO([p]).step()  # all is imported
torch.set_num_threads(3)
counts = [threads()]
ds_ext.LOMO([p]).step()
counts.append(threads())
p.grad.add_(p.grad)
counts.append(threads())
print(json.dumps(counts))
"""


@pytest.mark.slow
def test_passes_and_torch_share_threads():
    """A second pool would compete with torch's threads, which spin after each operation."""
    counts = json.loads(subprocess.check_output([sys.executable, "-c", COUNTS], text=True))
    before, after_pass, after_torch = counts
    assert (after_pass, after_torch) == (before + 2, before + 2)


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_forked_process_waits_for_no_thread_of_its_parent():
    with paths.threads(2):
        p = nn.Parameter(torch.randn(1024, 1024))
        p.grad = torch.randn(1024, 1024) * 2  # torch has begun its threads
        optimizer = ds_ext.AdaLomo([p], lr=0.01)
        if not (pid := os.fork()):
            signal.alarm(20)
            try:
                optimizer.step()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def interrupt_at(number: int):
    """A trace function that raises KeyboardInterrupt at this line of ``Table.run``."""
    left = [number]

    def trace(frame, event, _):
        if frame.f_code is not native.NativeTable.run.__code__:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    return trace


def test_after_an_interrupt_in_a_pass_no_number_of_it_is_stale():
    for number in itertools.count(1):
        p = nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = ds_ext.LOMO([p], lr=0.5, weight_decay=0.1)
        p.grad = torch.ones(7)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.25
        before = sys.gettrace()
        sys.settrace(interrupt_at(number))
        try:
            optimizer.step()
            done = True
        except KeyboardInterrupt:
            done = False
        finally:
            sys.settrace(before)
        if done:
            break
        q = nn.Parameter(p.detach().clone())
        p.grad, q.grad = torch.ones(7), torch.ones(7)
        optimizer.step()
        ds_ext.LOMO([q], lr=0.25, weight_decay=0.1).step()
        assert torch.equal(p, q), number
    assert number > 20


class Stepped(torch.utils.data.Dataset):
    """Its items are weights that were stepped by the process that asks for them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> torch.Tensor:
        p = nn.Parameter(torch.zeros(400_000))
        p.grad = torch.full_like(p, float(i))
        ds_ext.LOMO([p], lr=1.0).step()
        return p.detach()[::1000].clone()


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_workers_may_be_forked_during_a_step():
    weights = []
    with paths.threads(2):
        for forks in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 700))
            _, optimizer = fuse(model)
            for x in torch.randn(3, 3, 700):
                out = model[0](x)
                if forks:
                    out.register_hook(lambda g: check_items())  # model[1] is stepped, model[0] not
                model[1](out).square().mean().backward()
                optimizer.step()
            weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))


def check_items() -> None:
    loader = torch.utils.data.DataLoader(
        Stepped(), num_workers=2, multiprocessing_context="fork", timeout=30
    )
    for i, item in enumerate(loader):
        assert (item == -i).all()


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_process_forked_in_the_midst_of_a_pass_makes_passes():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's own threads do not survive a fork
    p = nn.Parameter(torch.zeros(400_000))
    p.grad = torch.ones_like(p)
    optimizer = ds_ext.LOMO([p], lr=1.0)
    optimizer.step()  # all is imported
    ended = threading.Event()

    def step():
        p = nn.Parameter(torch.zeros(3_000_000))
        p.grad = torch.ones_like(p)
        torch.set_num_threads(2)
        optimizer = ds_ext.LOMO([p], lr=1.0)
        while not ended.is_set():
            optimizer.step()

    thread = threading.Thread(target=step)
    thread.start()
    try:
        for _ in range(10):
            time.sleep(0.01)
            if not (pid := os.fork()):
                signal.alarm(20)
                torch.set_num_threads(1)
                p.grad.fill_(3.0)
                torch.set_num_threads(2)
                optimizer.step()
                os._exit(0 if (p[::1000].detach() == -4).all() else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        ended.set()
        thread.join()
        torch.set_num_threads(before)
