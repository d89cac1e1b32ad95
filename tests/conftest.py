"""What every test needs before ds_ext is imported: an accelerator by name, one thread a process."""

import gc
import os

import torch
from hypothesis import settings

from tests.tools import support

# DeepSpeed looks for an accelerator itself and may not settle on the CPU where there is none.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU, if a test asks for it

LINEAR = torch.nn.functional.linear

torch.set_num_threads(1)  # simulated and real ranks share the cores; also the order of sums

# The same examples at every run: a red test is red for everyone.
settings.register_profile("ds_ext", deadline=None, derandomize=True, database=None)
settings.load_profile("ds_ext")


def pytest_configure(config):
    if torch.cuda.is_available():  # tests compare kernels themselves, with many settings
        from ds_ext.optimizer import selftest

        selftest.CHECKED.clear()
    elif os.environ["TRITON_INTERPRET"] == "1":  # tests.tools.ir compiles kernels
        from tests.common import needs  # imports Triton, which then reads the variable

        if needs.TRITON:
            from tests.common import interpreter

            interpreter.quicken()
    config.pluginmanager.register(support.Collector(), "support")


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # what was imported is not looked through again, for a second each time


def pytest_unconfigure():
    gc.unfreeze()  # or libraries report that their objects are left


def pytest_runtest_teardown():
    torch.nn.functional.linear = LINEAR  # an engine at ZeRO-3 replaces it for the whole process
    if torch.cuda.is_available():  # paths.use may have set it
        torch.set_default_device(None)


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=4, help="ranks killed in the soak")
