"""Learning-rate schedulers of DeepSpeed, Hugging Face and torch, given to an engine in every way,
against the same scheduler on an ordinary optimizer. One rank, in this process."""

import functools

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.runtime import lr_schedules
from deepspeed.utils import groups as deepspeed_groups
from torch.optim import lr_scheduler as torch_schedules

from ds_ext.optimizer import OPTIMIZERS
from tests.common import authors, models
from tests.common.choose import params
from tests.common.plain import mean_step

STEPS = 12
LR = 0.3


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """A process group of this process alone; what DeepSpeed keeps of it is put back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)  # compiles
        patch.setenv("LOCAL_RANK", "0")
        patch.setattr(deepspeed.comm.comm, "cdb", None)
        for name, value in vars(deepspeed_groups).items():
            if name.isupper():
                patch.setattr(deepspeed_groups, name, value)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


network = functools.partial(models.layers, 5, 4, 3)


def loss_of(model, number):
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(number))
    return (model(x) - x[:, :3].sign()).square().mean()


def start(rule="LOMO", config=None, hypers=None, make=None, client=None):
    """An engine, its optimizer from the config or a ``client``, its scheduler from either."""
    made = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    } | (config or {})
    model = network()
    optimizer = client and client(model)
    if client is None:
        made["optimizer"] = {"type": rule, "params": hypers or {"lr": LR}}
    scheduler = make(optimizer) if client and make else make
    return deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=made
    )[0]


def run(engine, accumulation=1, metrics=None):
    """Trains -> weights, and each step's settings of the first group."""
    used = []
    for number in range(STEPS * accumulation):
        if number % accumulation == 0:
            used.append(settings(engine.optimizer))
        engine.backward(loss_of(engine, number))
        engine.step(lr_kwargs={"metrics": metrics(number)} if metrics else None)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        after = [p.detach().clone() for p in engine.module.parameters()]
    engine.destroy()
    return after, used


def reference(make, optimizer_of=None, accumulation=1, metrics=None):
    """The same by hand, with torch's SGD or another optimizer."""
    model = network()
    optimizer = optimizer_of(model) if optimizer_of else torch.optim.SGD(model.parameters(), lr=LR)
    scheduler = make(optimizer)
    used = []
    for step in range(STEPS):
        used.append(settings(optimizer))
        numbers = range(step * accumulation, (step + 1) * accumulation)
        mean_step(optimizer, [loss_of(model, number) for number in numbers])
        scheduler.step(*([metrics(step)] if metrics else []))
    return [p.detach() for p in model.parameters()], used


def settings(optimizer):
    group = optimizer.param_groups[0]
    return group["lr"], group.get("betas")


def assert_equal(got, expected):
    assert got[1] == expected[1]
    assert len(set(got[1])) > 1  # or there was nothing to follow
    for a, b, p in zip(got[0], expected[0], network().parameters(), strict=True):
        assert (a - b).norm() <= max(1e-5 * (b - p).norm(), STEPS * 2**-24 * b.norm())


CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4}
DEEPSPEED = {
    "warmup-log": ("WarmupLR", {"warmup_max_lr": 0.4, "warmup_num_steps": 5}),
    "decay": (
        "WarmupDecayLR",
        {"total_num_steps": 11, "warmup_max_lr": 0.4, "warmup_num_steps": 4},
    ),
    "cosine": ("WarmupCosineLR", {"total_num_steps": 10, "warmup_num_steps": 3}),
    "range": ("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3}),
    "cycle": ("OneCycle", CYCLE | {"decay_step_size": 2, "decay_lr_rate": 0.5}),
}


@pytest.mark.supports("schedulers of DeepSpeed", stage="stage", optimizer="LOMO")
@pytest.mark.parametrize("stage, accumulation", [(0, 2), (3, 1)])
@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_scheduler_of_the_config(name, stage, accumulation):
    kind, params = DEEPSPEED[name]
    config = {"scheduler": {"type": kind, "params": params}, "zero_optimization": {"stage": stage}}
    config |= {"gradient_accumulation_steps": accumulation}
    expected = reference(lambda o: getattr(lr_schedules, kind)(o, **params), None, accumulation)
    assert_equal(run(start(config=config), accumulation), expected)


TORCH = {
    "CosineAnnealingLR": {"T_max": 9},
    "OneCycleLR": {"max_lr": 0.5, "total_steps": STEPS + 1, "cycle_momentum": False},
    "StepLR": {"step_size": 3, "gamma": 0.5},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.4, "step_size_up": 3, "cycle_momentum": False},
    "CosineAnnealingWarmRestarts": {"T_0": 5},
}
HUGGING_FACE = {"linear": {}, "cosine_with_restarts": {"num_cycles": 2}, "inverse_sqrt": {}}
HUGGING_FACE |= {"warmup_stable_decay": {"num_decay_steps": 4}}
GIVEN = [("torch", name, how) for name in TORCH for how in ("config", "callable", "object")]
GIVEN += [("Hugging Face", name, how) for name in HUGGING_FACE for how in ("callable", "object")]
QUICK = [*GIVEN[::2], ("Hugging Face", "linear", "callable")]


@pytest.mark.supports(lambda library: f"schedulers of {library}", stage=3, optimizer="LOMO")
@pytest.mark.parametrize("library, name, given", params(GIVEN, QUICK))
def test_a_scheduler_is_followed_however_it_is_given(library, name, given):
    def make(optimizer):
        if library == "torch":
            return getattr(torch_schedules, name)(optimizer, **TORCH[name])
        more = HUGGING_FACE[name]
        return transformers.get_scheduler(name, optimizer, 3, STEPS, scheduler_specific_kwargs=more)

    ways = {
        "config": {"config": {"scheduler": {"type": name, "params": TORCH.get(name)}}},
        "callable": {"make": make},
        "object": {"make": make, "client": own("lomo", LR)},
    }
    assert_equal(run(start(**ways[given])), reference(make))


def metric(step):
    """Falls, and then no more."""
    return max(5 - step, 2)


def plateau(optimizer):
    return torch_schedules.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)


def test_a_plateau_scheduler_takes_its_metric_from_step():
    got = run(start(make=plateau), metrics=metric)
    assert_equal(got, reference(plateau, metrics=metric))


@pytest.mark.parametrize("make", [plateau, lambda o: transformers.get_scheduler("greedy", o)])
def test_a_scheduler_without_its_metric_is_an_error(make):
    # DeepSpeed would pass the batch size: the lr would fall, or rise, whatever the loss does
    with pytest.raises(ValueError, match=r'engine.step\(lr_kwargs={"metrics": ...}\)'):
        run(start(make=make))


def test_a_skipped_step_does_not_advance_the_scheduler():
    config = {"scheduler": {"type": "StepLR", "params": {"step_size": 1}}}
    engine = start(config=config | {"gradient_clipping": 1.0})
    for factor, lr in ((1.0, 0.1 * LR), (torch.nan, 0.1 * LR), (1.0, 0.01 * LR)):
        engine.backward(loss_of(engine, 0) * factor)
        engine.step()
        assert engine.get_lr() == [pytest.approx(lr)]
    assert engine.skipped_steps == 1
    engine.destroy()


def own(rule, lr=1e-3, **hypers):
    return lambda model: OPTIMIZERS[rule](model.parameters(), lr=lr, **hypers)


def authors_own(rule, lr=1e-3, **hypers):
    def make(model):
        groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
        return authors.ordinary(rule, groups, {"lr": lr, **hypers})

    return make


SLOW_CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 5e-3, "cycle_first_step_size": 4}
CYCLES = {  # of the betas too
    "torch": lambda o: torch_schedules.OneCycleLR(o, 5e-3, total_steps=STEPS + 1),
    "DeepSpeed": lambda o: lr_schedules.OneCycle(o, **SLOW_CYCLE),
}
STEADY = {
    "torch": lambda o: torch_schedules.StepLR(o, 3, 0.5),
    "DeepSpeed": lambda o: lr_schedules.WarmupLR(o, warmup_max_lr=0.02, warmup_num_steps=5),
}
BETAS = [("lamb", {}), ("galoreadamw", {"rank": 2})]
RULES = [(*rule, True, library) for rule in BETAS for library in CYCLES]
RULES += [("came", {}, True, "torch")]
WHOLE = [("apollo", {"rank": 2}), ("apollomini", {}), ("muon", {})]  # step whole matrices
RULES += [(*rule, False, library) for rule in WHOLE for library in STEADY]


@pytest.mark.supports(lambda library: f"schedulers of {library}", stage=3, optimizer="rule")
@pytest.mark.parametrize("rule, hypers, cycles, library", RULES)
def test_rules_with_betas_or_of_whole_matrices_follow_a_scheduler(rule, hypers, cycles, library):
    def made(model):
        return OPTIMIZERS[rule].for_model(model, lr=0.01, **hypers)

    make = (CYCLES if cycles else STEADY)[library]
    client = own(rule, **hypers) if cycles else made
    # Those of whole matrices are compared with steps of the whole model, without an engine.
    expected = reference(make, authors_own(rule, **hypers) if cycles else made)
    assert not cycles or len({betas for _, betas in expected[1]}) > 3
    assert_equal(run(start(make=make, client=client)), expected)


@pytest.mark.parametrize("given", ["config", "callable", "object"])
def test_onecycle_would_make_two_betas_of_the_three_of_came(given):
    in_config = {"scheduler": {"type": "OneCycle", "params": SLOW_CYCLE}}
    ways = {
        "config": {"rule": "CAME", "config": in_config},
        "callable": {"rule": "CAME", "make": CYCLES["DeepSpeed"]},
        "object": {"make": CYCLES["DeepSpeed"], "client": own("came")},
    }
    message = (
        'CAME has 3 betas, and OneCycle sets 2: put "cycle_momentum": false into scheduler.params'
    )
    with pytest.raises(ValueError, match=message):
        start(**ways[given])


def test_onecycle_goes_with_came_if_it_leaves_the_betas():
    params = SLOW_CYCLE | {"cycle_momentum": False}
    config = {"scheduler": {"type": "OneCycle", "params": params}}
    expected = reference(lambda o: lr_schedules.OneCycle(o, **params), authors_own("came"))
    assert_equal(run(start("CAME", config)), expected)


def test_torch_says_what_to_do_where_there_are_no_betas():
    with pytest.raises(ValueError, match="cycle_momentum"):
        start("AdaLomo", make=CYCLES["torch"])
