"""What every test needs before ds_ext is imported: an accelerator by name, one thread a process.

And the real ranks: each world is started once, and runs all cases of worker.py.
"""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import support

# DeepSpeed looks for an accelerator itself and may not settle on the CPU where there is none.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU, if a test asks for it

torch.set_num_threads(1)  # simulated and real ranks share the cores; also the order of sums

# The same examples at every run: a red test is red for everyone.
settings.register_profile("ds_ext", deadline=None, derandomize=True, database=None)
settings.load_profile("ds_ext")


class Results(dict):
    """What worker.py found, by case; a test whose case was not run with three ranks is skipped."""

    def __init__(self, found: dict, world: int) -> None:
        super().__init__(found)
        self.world = world

    def __missing__(self, name: str) -> None:
        from tests.distributed.worker import ON_THREE

        if self.world < 3 or ON_THREE.search(name):
            raise KeyError(name)
        pytest.skip("run with one and two ranks: see ON_THREE in worker.py")


@pytest.fixture(scope="session", params=[1, 2, 3], ids="ranks{}".format)
def run(request, tmp_path_factory):
    """(number of ranks, results of worker.py by case)."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all processes that test side by side
    out = folder / f"world{request.param}.pt"
    log = folder / f"world{request.param}.log"
    with open(folder / f"world{request.param}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes first runs it
        if not log.exists():
            log.write_text(world(request.param, out))
    assert out.exists(), log.read_text()
    return request.param, Results(torch.load(out, weights_only=False), request.param)


def world(ranks: int, out: Path) -> str:
    """Runs all cases on real ranks, into ``out`` if they end well -> the end of what they wrote."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc_per_node={ranks}", "-m", "tests.distributed.worker", str(out)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode:
        out.unlink(missing_ok=True)
    return done.stdout[-3000:] + done.stderr[-3000:]


def pytest_configure(config):
    config.pluginmanager.register(support.Collector(config))


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=4, help="ranks killed in the soak")
