"""A rank of a world of tests/worlds.py: what it imports before it is forked, and how it runs jobs.

The process that is forked must never have run backward: torch's autograd does not survive it.
"""

import contextlib
import copy
import faulthandler
import gc
import importlib
import io
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import accelerate.state
import deepspeed
import numpy
import peft  # noqa: F401  imported here, or each rank would do it
import torch
import torch._dynamo
import torch.distributed as dist
import transformers.models.bert.modeling_bert  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
import transformers.trainer  # noqa: F401
from _pytest.assertion import install_importhook
from _pytest.config import get_config
from torch.distributed.distributed_c10d import _world

import ds_ext  # noqa: F401

# The assertions of jobs show their values, as those of tests do.
install_importhook(get_config()).mark_rewrite("tests.distributed", "tests.integration")
from tests.distributed import zero_jobs  # noqa: E402, F401  which most jobs import

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s

# Generators of devices that are not here would each note a stack for when they come.
torch.manual_seed = torch.random.manual_seed = torch.default_generator.manual_seed

ROOT = Path(__file__).parent.parent
_save, _ftruncate = torch.save, os.ftruncate  # a job may replace them

# Modules whose globals a job may change; they are put back after it.
STATEFUL = [
    importlib.import_module(name)
    for name in (
        "deepspeed.utils.groups",
        "deepspeed.runtime.activation_checkpointing.checkpointing",
        "deepspeed.runtime.zero.partition_parameters",
        "deepspeed.module_inject.layers",
        "deepspeed.sequence.layer",
        "deepspeed.module_inject.auto_tp",
        "deepspeed.runtime.sequence_parallel.parallel_state_sp",
        "deepspeed.runtime.torch_autocast",
        "torch.nn.functional",
        "transformers.integrations.deepspeed",
    )
]


def serve(
    rank: int, size: int, port: int, timeout: float, output: str, connection: Connection
) -> None:
    """Joins a world of ``size`` ranks, of which the first listens at ``port``, and runs jobs.

    ``connection`` brings (paths to import from, job, arguments, whether it is the last). Each is
    answered with (whether it ended well, its saved result or its traceback). ``timeout`` is the
    seconds that a collective waits, ``output`` the file that takes stdout and stderr.
    """
    code = 1
    try:
        _redirect(output)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        torch.set_num_threads(1)
        deepspeed.init_distributed("gloo", timeout=timedelta(seconds=timeout), verbose=False)
        surroundings = Surroundings()
        is_last = False
        while not is_last:
            paths, job, args, is_last = _receive(connection)
            sys.path += [path for path in paths if path not in sys.path]
            _ftruncate(1, 0)
            surroundings.begin()
            result = _saved(_loaded(job)(*pickle.loads(args)))
            if not is_last:
                surroundings.restore()
            _flush()
            connection.send((True, result))
        if dist.is_initialized():  # a last job may have left its group
            dist.barrier()
        code = 0
    except BaseException:
        text = traceback.format_exc()
        sys.stderr.write(text)
        _flush()
        with contextlib.suppress(OSError):
            connection.send((False, text))
    # Without the interpreter's teardown, in which torch 2.13 sometimes aborts after all is done
    # (about one run in sixty of a gloo group of three).
    _flush()
    os._exit(code)


class Surroundings:
    """All that a job may leave behind in its process: ``restore`` puts it back."""

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.path = list(sys.path)
        self.groups = set(_world.pg_map)
        self.globals = [
            {name: _copied(value) for name, value in vars(module).items()} for module in STATEFUL
        ]

    def begin(self) -> None:
        """Seeds every generator."""
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)

    def restore(self) -> None:
        """Forgets engines, process groups, settings and singletons of the job that has ended."""
        dist.barrier()  # nobody destroys a group that another rank still uses
        for module, before in zip(STATEFUL, self.globals, strict=True):
            for name in set(vars(module)) - set(before):
                delattr(module, name)
            vars(module).update({name: _copied(value) for name, value in before.items()})
        for kind in (accelerate.state.AcceleratorState, accelerate.state.PartialState):
            kind._reset_state()
        accelerate.state.GradientState._reset_state()
        torch._dynamo.reset()
        gc.collect()
        for group in [group for group in _world.pg_map if group not in self.groups]:
            dist.destroy_process_group(group)
        gc.collect()
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(ROOT)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value


def _receive(connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError:  # the process that runs the tests has ended
        os._exit(1)


def _loaded(job: str) -> Callable[..., Any]:
    module, _, name = job.partition(":")
    function = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    return getattr(function, "job", function)  # type: ignore[return-value]


def _saved(result: Any) -> bytes:
    buffer = io.BytesIO()
    _save(result, buffer)
    return buffer.getvalue()


def _redirect(output: str) -> None:
    """Lets all output go to a file, and the stack too at SIGUSR1."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


gc.collect()
gc.freeze()  # what was imported is not looked through again, nor copied by doing so
