"""Jobs about a model's owners, for real ranks: second engines, Trainers and calls of train()."""

import copy
import functools
import gc
import io
import tempfile
import weakref
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from torch import nn

import ds_ext
from tests.common.plain import mean_step
from tests.common.ranks import logged, message, whole
from tests.integration import trainer_runs

STEPS = 3


def make() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(3, 6, generator=generator)).square().mean()


def start(model: nn.Module, stage: int, kept: int, ours: bool = True, **more: Any):
    """An engine; at stage 3 it keeps parameters of up to ``kept`` elements gathered."""
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": kept},
        **more,
    }
    adamw = torch.optim.AdamW
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = (ds_ext.LOMO if ours else adamw)(trained, lr=0.1 if ours else 1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def steps(engine, numbers: range) -> dict[str, torch.Tensor]:
    for step in numbers:
        engine.backward(loss_of(engine, step, dist.get_rank()))
        engine.step()
    return whole(engine.module)


def second_engine(stage: int, ours: bool, begun: bool) -> dict[str, Any]:
    """An engine, of ours or with AdamW, on the model of one of ours."""
    model = make()
    with logged() as told:
        older = start(model, stage, 10)
        if begun:
            steps(older, range(1))
        before = whole(model)
        newer = start(model, stage, 40, ours)
    after = steps(newer, range(STEPS))
    refused = message(functools.partial(steps, older, range(1)), RuntimeError)
    unmoved = whole(model)
    gone = weakref.ref(older)
    del older
    gc.collect()
    return {
        "before": before,
        "after": after,
        "said": sum("takes over" in line for line in told),
        "refused": refused,
        "unmoved": all(torch.equal(p, after[n]) for n, p in unmoved.items()),
        "held": gone() is not None,
    }


def reference(before: dict[str, torch.Tensor], world: int, ours: bool) -> dict[str, torch.Tensor]:
    """What the second engine's steps end with."""
    model = make()
    model.load_state_dict(before)
    made = torch.optim.SGD if ours else torch.optim.AdamW
    optimizer = made(model.parameters(), lr=0.1 if ours else 1e-2)
    for step in range(STEPS):
        mean_step(optimizer, [loss_of(model, step, rank) for rank in range(world)])
    return dict(model.named_parameters())


def unfinished(stage: int) -> dict[str, Any]:
    """A second engine while the first waits for a further micro-batch; then after its end."""
    model = make()
    older = start(model, stage, 10, gradient_accumulation_steps=2)
    older.backward(loss_of(older, 0, dist.get_rank()))
    older.step()
    before = whole(model)
    refused = message(lambda: start(model, stage, 10), RuntimeError)
    older.backward(loss_of(older, 1, dist.get_rank()))
    older.step()
    middle = whole(model)
    after = steps(start(model, stage, 10), range(1))
    return {"refused": refused, "moved": [_moved(before, middle), _moved(middle, after)]}


def shared_trunk(stage: int) -> dict[str, str]:
    """Two engines whose models share a layer -> what the steps of the older and newer one say."""
    trunk = nn.Linear(6, 9)
    older, newer = (start(nn.Sequential(trunk, nn.Linear(9, 4)), stage, 0) for _ in range(2))
    step = functools.partial(steps, numbers=range(1))
    return {
        "newer": message(lambda: step(newer), RuntimeError),
        "older": message(lambda: step(older), RuntimeError),
    }


def shared_memory(stage: int) -> str:
    """What is said of a frozen layer whose weight has the memory of a trained one."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=False)
    return message(lambda: start(model, stage, 0), ValueError)


def scored_before(stage: int) -> dict[str, Any]:
    """An engine on a partitioned model that an engine without an optimizer has scored."""
    model = make()
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    scorer = deepspeed.initialize(model=model, config=config)[0]
    with torch.inference_mode():
        loss_of(scorer, 0, dist.get_rank())
    scorer.destroy()
    engine = start(model, stage, 0)
    return {"before": whole(model), "after": steps(engine, range(STEPS))}


def _moved(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return not all(torch.equal(p, b[n]) for n, p in a.items())


def copied(stage: int) -> dict[str, Any]:
    """A copy of the engine's module, made between steps."""
    engine = start(make(), stage, 0)
    steps(engine, range(1))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        twin = copy.deepcopy(engine.module)
    before = whole(engine.module)
    equal = all(torch.equal(p, before[n]) for n, p in twin.named_parameters())
    result = {"equal": equal}
    if stage < 3:  # DeepSpeed's own hooks gather what a copy does not have, with AdamW as well
        saved = io.BytesIO()
        torch.save(engine.module, saved)  # cannot be done with AdamW
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False).state_dict()
        result["loaded"] = not _moved(before, loaded)
        called = engine._forward_prologue
        engine._forward_prologue = None  # a copy does not call it
        calls = engine.optimizer.fused.buckets.uses.count.copy()
        loss_of(twin, 1, dist.get_rank()).backward()
        result["grads"] = all(p.grad is not None for p in twin.parameters())
        result["quiet"] = engine.optimizer.fused.buckets.uses.count == calls
        engine._forward_prologue = called
        result["quiet"] &= not _moved(before, whole(engine.module))
    result["goes on"] = _moved(before, steps(engine, range(1, 2)))
    return result


def trainers(kind: str, twice: str) -> dict[str, Any]:
    """HF Trainer twice: a second one on the same model, or a second train() of the same one."""
    optimizer = {"type": "LOMO", "params": {"lr": "auto"}}
    if kind == "adamw":
        optimizer = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "optimizer": optimizer,
    }
    model = trainer_runs.model()
    start = whole(model)

    def trainer(folder: str):
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            deepspeed=config,
            max_steps=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            max_grad_norm=0.0,
            learning_rate=1e-2,
            per_device_train_batch_size=2,
        )
        return transformers.Trainer(model=model, args=arguments, train_dataset=trainer_runs.data())

    with tempfile.TemporaryDirectory() as folder:
        one = trainer(folder)
        one.train()
        middle = whole(model)
        error = ""
        try:
            (one if twice == "train" else trainer(folder)).train()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
    return {"moved": [_moved(start, middle), _moved(middle, whole(model))], "error": error}


def after_adamw(stage: int) -> dict[str, Any]:
    """An engine of ours on the model of one with AdamW: before and after its destroy()."""
    model = make()
    older = start(model, stage, 10, ours=False)
    steps(older, range(1))
    before = whole(model)
    refused = message(lambda: start(model, stage, 10), ValueError)
    unmoved = not _moved(before, whole(model))
    older.destroy()
    after = steps(start(model, stage, 40), range(STEPS))
    return {"refused": refused, "unmoved": unmoved, "before": before, "after": after}


def changed_stage(first: int, second: int) -> dict[str, Any]:
    """An engine at another stage than the one whose model it takes over."""
    model = make()
    steps(start(model, first, 10), range(1))
    before = whole(model)
    try:
        return {"before": before, "after": steps(start(model, second, 10), range(STEPS))}
    except ValueError as error:
        return {"refused": str(error)}
