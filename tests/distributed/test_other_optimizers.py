"""DeepSpeed engines with optimizers of others take no path of ours.

``torchrun -m tests.distributed.test_other_optimizers WAY FOLDER`` trains them on two ranks, and
writes what others may see of it as JSON. WAY says what else the program does: "plain" nothing, and
"beside" imports ds_ext, and trains an engine of ours between them.
"""

import contextlib
import functools
import io
import json
import logging
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups, logger
from torch import nn

from tests.common import apart
from tests.worlds import free_port

pytestmark = pytest.mark.slow
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s
WAY = sys.argv[1] if __name__ == "__main__" else ""
if WAY == "beside":
    import ds_ext  # noqa: F401

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("all_reduce", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object"),
    *("irecv", "isend", "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_tensor", "scatter", "send", "all_to_all_single"),
)
PATCHES = "engine/patches.py"
calls: list[str] = []  # of collectives
lines: list[str] = []  # of logs


def main() -> None:
    for name in filter(lambda name: hasattr(dist, name), COLLECTIVES):
        setattr(dist, name, _recorded(name, getattr(dist, name)))
    logger.addHandler(_Recorder())
    logging.getLogger().addHandler(_Recorder())
    logger.setLevel(logging.INFO)
    deepspeed.init_distributed("gloo")
    groups._get_data_parallel_group()  # which DeepSpeed makes with the first engine
    own, seen = None, {}
    for name, program in PROGRAMS.items():
        seen[name] = _seen(program)
        if WAY == "beside":
            own = own or OwnEngine()  # the first program runs when ds_ext is imported alone
            own.step()
    told: dict[str, Any] = {"seen": seen, "globals": _globals()}
    if own is not None:
        alone = OwnEngine()
        for _ in PROGRAMS:
            alone.step()
        told["own"], told["alone"] = (_weights(x.engine.module) for x in (own, alone))
    Path(sys.argv[2], str(dist.get_rank())).write_text(json.dumps(told))


def _seen(program: Callable[[], Any]) -> dict[str, Any]:
    """The result of a program, or its error as it is shown, with its collectives and logs."""
    calls.clear()
    lines.clear()
    shown = io.StringIO()
    result = None
    try:
        result = program()
    except Exception as error:
        with contextlib.redirect_stderr(shown):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        groups.mpu = None  # of DeepSpeed: the next engine would have this one's groups
    frames = re.findall(r'File ".*/(\w+/\w+\.py)", line \d+, in (\w+)', shown.getvalue())
    return {
        "result": result,
        # The frames of a patch are not hidden.
        "shown": [frame for frame in frames if frame[0] != PATCHES],
        "error": shown.getvalue().splitlines()[-1:],
        "collectives": list(calls),
        "logs": [re.sub(r"0x\w+|\d+\.\d+|/tmp/\w+", "N", line) for line in lines],
    }


def train(stage: int, optimizer: Any = None, steps: int = 3, **more: Any) -> list[float]:
    """Weights after some steps of DeepSpeed's engine."""
    model = _model()
    config = _config(stage)
    if optimizer is None:
        config["optimizer"] = {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}}
    else:
        optimizer = optimizer(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, **more)
    for step in range(steps):
        engine.backward(engine(_inputs(step)).square().mean())
        engine.step()
    if engine.dp_world_size > 1:
        _resume(engine)
    weights = _weights(model)
    engine.destroy()
    return weights


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def rank_0_alone() -> list[float]:
    group = dist.new_group([0])
    if dist.get_rank():
        return []
    told = {"group": lambda: group, "world_size": lambda: 1, "rank": lambda: 0}
    kinds = "data", "model"
    getters = {f"get_{kind}_parallel_{name}": get for kind in kinds for name, get in told.items()}
    return train(0, sgd, mpu=SimpleNamespace(**getters))


def pipeline() -> list[float]:
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    torch.manual_seed(0)
    model = PipelineModule(layers, num_stages=2, loss_fn=lambda out, label: (out - label).mean())
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=sgd(model.parameters()), config=_config(0)
    )
    batches = iter([(_inputs(step), _inputs(9)) for step in range(2)])
    engine.train_batch(batches)
    return [float(engine.train_batch(batches)), *_weights(model)]


def partitioned() -> list[float]:
    with deepspeed.zero.Init(config_dict_or_path=_config(3)):
        model = _model()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=1):
        model[0].bias.data.fill_(dist.get_rank())
    return _weights(model)


def initialize(**keys: Any) -> None:
    deepspeed.initialize(model=_model(), config=_config(0) | keys)


def failing_ranks() -> list[float]:
    """Each rank fails by an error of the program, in a function that DeepSpeed calls."""

    def optimizer(params: Any) -> torch.optim.Optimizer:
        raise ValueError(f"an error of rank {dist.get_rank()}")

    return train(0, lambda params: optimizer)


def foreign_file() -> None:
    """An object that torch does not load without being told that it is safe."""
    file = io.BytesIO()
    torch.save({"a": SimpleNamespace(b=1)}, file)
    file.seek(0)
    torch.load(file, weights_only=True)


PROGRAMS: dict[str, Callable[[], Any]] = {
    # Of optimizers that the config names, of an object, and of a function.
    **{f"stage {stage}": functools.partial(train, stage) for stage in range(4)},
    "object": lambda: train(0, sgd),
    "function": lambda: train(1, lambda params: sgd),
    "rank 0 alone": rank_0_alone,
    "pipeline": pipeline,
    "partitioned": partitioned,
    "wrong config": lambda: initialize(zero_optimization={"stge": 3}),
    "unknown type": lambda: initialize(optimizer={"type": "Whatever"}),
    "failing ranks": failing_ranks,
    "foreign file": foreign_file,
}


class OwnEngine:
    def __init__(self) -> None:
        config = _config(3) | {"optimizer": {"type": "AdaLomo", "params": {"lr": 0.1}}}
        self.engine, *_ = deepspeed.initialize(model=_model(), config=config)
        self.steps = 0

    def step(self) -> None:
        self.engine.backward(self.engine(_inputs(self.steps)).square().mean())
        self.engine.step()
        self.steps += 1
        _resume(self.engine)


def _resume(engine: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = [folder]
        dist.broadcast_object_list(path)
        engine.save_checkpoint(path[0])
        engine.load_checkpoint(path[0])
        dist.barrier()


def _globals() -> dict[str, str]:
    return {
        "excepthook": sys.excepthook.__qualname__,
        "safe globals": str(sorted(x.__qualname__ for x in torch.serialization.get_safe_globals())),
        "optimizers": str(deepspeed.runtime.config.DEEPSPEED_OPTIMIZERS),
        "mpu": str(groups.mpu),
        "log level": str(logger.level),
        "handlers": str([type(handler).__name__ for handler in logging.getLogger().handlers]),
    }


def _config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def _inputs(step: int) -> torch.Tensor:
    rank = dist.get_rank()
    return torch.randn(1, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def _weights(model: nn.Module) -> list[float]:
    with deepspeed.zero.GatheredParameters(p for p in model.parameters()):
        return [float(x) for p in model.parameters() for x in p.detach().flatten()]


def _recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        sizes = [x.numel() for x in given if isinstance(x, torch.Tensor)]
        calls.append(f"{name} {sizes}")
        return function(*args, **kwargs)

    return call


class _Recorder(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if "Removed grad acc hooks" not in record.getMessage():  # when an engine is freed
            lines.append(f"{record.name}: {record.getMessage()}")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    found = {}
    for way in ("plain", "beside"):
        folder = tmp_path_factory.mktemp(way)
        start = ["torch.distributed.run", "--nproc_per_node", 2, "--master_port", free_port(), "-m"]
        program = "tests.distributed.test_other_optimizers"
        apart.python("-m", *start, program, way, folder, timeout=240)
        found[way] = [json.loads((folder / rank).read_text()) for rank in "01"]
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_collectives_logs_and_errors_are_those_of_deepspeed(told, name):
    for plain, other in zip(told["plain"], told["beside"], strict=True):
        assert other["seen"][name] == plain["seen"][name]


def test_globals_are_those_of_deepspeed_and_an_engine_of_ours_trains_as_alone(told):
    for plain, other in zip(told["plain"], told["beside"], strict=True):
        assert other["globals"] == plain["globals"]
        assert other["own"] == other["alone"]


def test_the_programs_train_and_fail(told):
    """Or nothing would be compared."""
    for rank, plain in enumerate(told["plain"]):
        failed = {name for name, seen in plain["seen"].items() if seen["error"]}
        assert failed == {"wrong config", "unknown type", "failing ranks", "foreign file"}
        assert f"ValueError: an error of rank {rank}" in plain["seen"]["failing ranks"]["error"][0]
        assert plain["seen"]["stage 3"]["collectives"] and plain["seen"]["stage 3"]["logs"]
    assert told["plain"][0]["seen"]["rank 0 alone"]["result"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
