"""A wrong config, or a wrong program, ends all ranks at once, with an error that names the key."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ds_ext
from tests import worlds
from tests.common.ranks import logged, message
from tests.distributed.wrong_configs_jobs import (
    RIGHT,
    SIZES,
    Run,
    entries,
    ours,
    own,
    scheduler,
    zero,
)

WRONG: dict[str, dict[str, Any]] = {
    "optimizer.type is 'AdaLom'": {"optimizer": {"type": "AdaLom"}},
    "optimizer.params.lrr": ours({"lrr": 1}),
    "zero_optimization.stge: Extra": RIGHT | {"zero_optimization": {"stge": 3}},
    'unknown key optimzer. Did you mean "optimizer"': {"optimzer": RIGHT["optimizer"]},
}


def shown() -> list[str]:
    """What ``sys.excepthook`` shows of each config of ``WRONG``, as where a script ends."""
    found = []
    for config in WRONG.values():
        with contextlib.redirect_stderr(io.StringIO()) as text:
            try:
                deepspeed.initialize(model=nn.Linear(4, 4), config=SIZES | config)
            except Exception:
                sys.excepthook(*sys.exc_info())
        found.append(text.getvalue())
    return found


def test_a_wrong_config_is_named_on_all_ranks():
    for rank, texts in enumerate(worlds.run(2, shown)):
        for words, text in zip(WRONG, texts, strict=True):
            (line,) = [line for line in text.splitlines() if "ValueError: " in line]
            assert line.startswith(f"[rank{rank}]: ValueError: ") and words in line, text


def engine(model: nn.Module, changes: Any = None, **given: Any) -> Any:
    """An engine at stage 1; if it is given no optimizer, its config names one."""
    config = SIZES | zero(1) | ({} if "optimizer" in given else RIGHT) | (changes or {})
    return deepspeed.initialize(model=model, config=config, **given)[0]


def undivided() -> str:
    return message(lambda: engine(linear(), zero(3, zero_hpz_partition_size=2)))


def test_groups_that_do_not_divide_the_ranks_are_refused_on_all_ranks():
    for told in worlds.run(3, undivided):
        assert "zero_hpz_partition_size = 2 does not divide the 3 ranks" in told


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def frozen() -> nn.Linear:
    return linear().requires_grad_(False)


def fuse(model: nn.Module) -> None:
    ds_ext.fuse_into_backward(model, ds_ext.AdaLomo(model.parameters()))


def by_object(kind: type, changes: Any = None) -> Any:
    model = linear()
    return engine(model, changes, optimizer=kind(model.parameters()))


def own_step(is_engines: bool) -> None:
    """A step of the engine's own optimizer, which has nothing left to do, or of another one."""
    model = linear()
    optimizer = (ds_ext.AdaLomo if is_engines else ds_ext.AdamW)(model.parameters())
    made = engine(model, **({"optimizer": optimizer} if is_engines else {}))
    made.backward(made(torch.eye(4)).sum())
    optimizer.step()


def function() -> None:
    """A function that makes an optimizer of ds_ext; the model can be used again."""
    model = linear()
    try:
        engine(model, zero(3), optimizer=ds_ext.Lion)
    finally:
        assert not model._forward_pre_hooks and not hasattr(model.weight, "ds_tensor")


def fused_at_stage_3(is_ended: bool) -> None:
    """A model that ZeRO-3 has partitioned, and whose engine may have ended."""
    model = linear()
    made = engine(model, zero(3))
    if is_ended:
        made.destroy()
    fuse(model)


def shared_memory() -> None:
    """A frozen parameter, which the optimizer lacks, in the memory of a trained one."""
    model = nn.Linear(6, 9)
    optimizer = ds_ext.AdaLomo(model.parameters())
    model.frozen = nn.Parameter(model.weight.detach()[:3], requires_grad=False)
    engine(model, optimizer=optimizer)


def without_optimizer(changes: dict[str, Any], stages: Iterable[int] = range(4)) -> None:
    """A config that names no optimizer, at any stage."""
    engines = [partial(engine, linear(), zero(s) | changes, optimizer=None) for s in stages]
    (told,) = set(map(message, engines))
    if told:
        raise ValueError(told)


def init_with_auto() -> None:
    """accelerate fills in the norm after the model is made, and HF Trainer in axolotl the dtype."""
    config = SIZES | RIGHT | zero(3) | {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        linear()


SPLIT = own(batch_splits=2)
SPLITS = "ds_ext.batch_splits = 2: split_batch: "
FROZEN = "AdaLomo: all its parameters have requires_grad=False"
BESIDE = 'optimizer.type "AdaLomo" in the config has no effect, because the program passes'
FUNCTION = "deepspeed.initialize: the optimizer is a function"
PARTITIONED = "fuse_into_backward: ZeRO-3 has partitioned this model,"
AUTO = 'is "auto", which is filled in by HF'
RATES = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}}
LEFT_AUTO = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
SIZES_BY_HF = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
# Programs, and how their errors begin.
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: engine(frozen()), FROZEN),
    (lambda: fuse(frozen()), FROZEN),
    (partial(own_step, False), "AdamW.step() found no gradients: an engine"),
    (function, FUNCTION),
    (lambda: engine(linear(), own(batch_splits=1), optimizer=torch.optim.AdamW), FUNCTION),
    (partial(fused_at_stage_3, False), f"{PARTITIONED} and its engine steps inside backward"),
    (partial(fused_at_stage_3, True), f"{PARTITIONED} which only a DeepSpeed engine can train"),
    (
        lambda: by_object(ds_ext.AdaLomo, {"gradient_clipping": "1.0"}),
        "gradient_clipping is '1.0'; allowed: a number >= 0.",
    ),
    (
        lambda: engine(torch.compile(linear(), backend="eager"), zero(3)),
        "zero_optimization.stage = 3 cannot partition what torch.compile",
    ),
    (
        lambda: engine(linear()).compile(backend="eager", compiled_autograd_enabled=True),
        "engine.compile(compiled_autograd_enabled=True)",
    ),
    (lambda: engine(DistributedDataParallel(linear())), "the model is wrapped by Distributed"),
    (shared_memory, "parameters share memory with each other"),
    (
        partial(without_optimizer, own(batch_splits=1)),
        'deepspeed.initialize: the config has a section "ds_ext", but no optimizer',
    ),
    (lambda: engine(linear(), SIZES_BY_HF), f"train_batch_size {AUTO}"),
    (lambda: engine(linear(), {"gradient_clipping": "auto"}), f"gradient_clipping {AUTO}"),
    (lambda: engine(linear(), {"steps_per_print": "auto"}), f"steps_per_print {AUTO}"),
    (lambda: engine(linear(), LEFT_AUTO), f"scheduler.params.warmup_num_steps {AUTO}"),
    (lambda: engine(linear(), {"bf16": {"enabled": "auto"}}), f"bf16.enabled {AUTO}"),
    (
        lambda: engine(linear(), scheduler("WarmupLR", warmup_max_lr=[1e-3, 1e-3])),
        "scheduler.params: WarmupLR cannot be made with them: ValueError: expected 1 value",
    ),
    (lambda: engine(linear(), ours({"weight_decay": 1}), model_parameters=[]), "optimizer got"),
    (lambda: engine(linear(), model_parameters=[{"lr": 0.1}]), "model_parameters of deepspeed.in"),
    (lambda: engine(linear()).optimizer.step(), "engine.optimizer.step() was called"),
    # Models that are not split.
    (lambda: engine(linear(), SPLIT), f"{SPLITS}the model has no nn.ModuleList of at least two"),
    (
        lambda: engine(linear(), own(batch_splits=1, chunked_loss=True)),
        "chunk_loss: Linear contains no language model of transformers with an output head",
    ),
    (
        lambda: by_object(partial(torch.optim.SGD, lr=0.1), SPLIT),
        "ds_ext.batch_splits = 2 is a setting of ds_ext, and SGD is not a ds_ext optimizer",
    ),
]
# Programs that run, and how their one warning begins, if there is one.
WARNED: list[tuple[Callable[[], Any], str]] = [
    (partial(own_step, True), ""),
    (lambda: by_object(torch.optim.AdamW, RIGHT), f"{BESIDE} AdamW to deepspeed.initialize"),
    (lambda: by_object(ds_ext.Lion, RIGHT), f"{BESIDE} Lion to deepspeed.initialize"),
    (
        lambda: engine(linear(), RATES | entries({"match": "bias", "lr": 0.5})),
        "scheduler.params.warmup_max_lr = 0.1 replaces the learning rates of the optimizer, ",
    ),
    (init_with_auto, ""),
    # An engine that is not ours.
    (partial(without_optimizer, {"optimizer": {"params": {"lr": 1e-3}}}, [3]), ""),
]


def mistakes() -> list[Run]:
    found = []
    for mistake, _ in [*REFUSED, *WARNED]:
        error = ""
        with logged() as lines:
            try:
                mistake()
            except Exception as refused:
                error = f"{type(refused).__name__}: {refused}"
        found.append(Run(error, lines))
    return found


def test_a_mistake_of_a_program_is_named_at_once():
    (told,) = worlds.once(1, mistakes)
    for (_, words), (error, _) in zip(REFUSED, told, strict=False):
        kind = "RuntimeError" if ".step()" in words else "ValueError"
        assert error.startswith(f"{kind}: {words}")
    for (_, warning), (error, lines) in zip(WARNED, told[len(REFUSED) :], strict=True):
        assert not error
        assert sum(line.startswith(warning) for line in lines) == 1 or not warning
    assert not any("optimizer.type" in line for line in told[-1].log)


def summed(stage: int, op: str) -> Any:
    """The weights before and after a step of LOMO, with each way to combine ranks' gradients."""
    torch.manual_seed(1)
    model = nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()
    changes = zero(stage) | ours({"lr": 0.5}, "LOMO") | {"gradient_allreduce_op": op}
    made = engine(model, changes)
    made.backward(made(torch.full((2, 4), 1.0 + dist.get_rank())).sum())
    made.step()
    return before, model.weight.detach().clone()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_of_the_ranks_are_summed_or_averaged(stage):
    """LOMO steps by lr times the gradient, which is the sum of a rank's inputs: 2 and 4."""
    for op, gradient in (("sum", 6.0), ("mean", 3.0)):
        for before, after in worlds.run(2, summed, stage, op):
            assert (before - after - 0.5 * gradient).abs().max() < 1e-5
