"""PyTorch's database of optimizers, each input of it put through what PyTorch expects of all.

The database has arguments and wrong arguments of torch.optim's classes. If ``swapped`` has made
three of them ds_ext's, all optimizers of ds_ext follow with arguments of their own.
"""

import copy
import functools
import pickle
import sys

import pytest
import torch
from torch.nn import Parameter
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
    optim_db,
)

import ds_ext
from tests.common.hypers import NEEDED

SHAPES = [(4, 6), (6, 3), (2, 5)]


def _inputs(name, device, dtype=None):
    """Arguments of a rule, as the database has them of torch's classes."""
    own = {"default": {}, "non-default lr": {"lr": 0.01}, "weight_decay": {"weight_decay": 0.1}}
    return [OptimizerInput(None, NEEDED[name] | hypers, desc) for desc, hypers in own.items()]


OF_TORCH = [info for info in optim_db if info.name in ("SGD", "Adam", "AdamW")]
INFOS = [*OF_TORCH]
if issubclass(torch.optim.SGD, ds_ext.RuleOptimizer):
    INFOS += [
        OptimizerInfo(
            optimizer,
            optim_inputs_func=functools.partial(_inputs, name),
            optim_error_inputs_func=get_error_inputs_for_all_optims,
        )
        for name, optimizer in ds_ext.OPTIMIZERS.items()
    ]


def named(info, given, number):
    origin = "ds_ext." if info.optim_cls.__module__ == "ds_ext" else ""
    return pytest.param(info, given, id=f"{origin}{info.name}-{number}-{given.desc}")


def inputs(infos):
    return [
        named(info, x, i) for info in infos for i, x in enumerate(info.optim_inputs_func("cpu"))
    ]


EACH_INPUT = pytest.mark.parametrize("info, given", inputs(INFOS))
EACH_INPUT_OF_TORCH = pytest.mark.parametrize("info, given", inputs(OF_TORCH))
EACH_ERROR = pytest.mark.parametrize(
    "info, given, wrong",
    [
        pytest.param(*param.values, wrong, id=param.id)
        for info in INFOS
        for i, wrong in enumerate(info.optim_error_inputs_func("cpu", torch.float32))
        for param in [named(info, wrong.optimizer_error_input, i)]
    ],
)
EACH_SCHEDULER = pytest.mark.parametrize(
    "info, schedulers",
    [
        pytest.param(info, made, id=f"{named(info, OptimizerInput(None, {}), i).id}")
        for info in INFOS
        for i, made in enumerate(info.scheduler_inputs)
    ],
)


def weights(contiguous=True):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [Parameter(x if contiguous else x.t().contiguous().t()) for x in values]


def stepped(optimizer, params, seeds):
    """Steps by random gradients, and returns the parameters."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return params


def made(info, params, given):
    return info.optim_cls(params, **copy.deepcopy(given.kwargs))


def assert_equal(left, right, **close):
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, **close or {"rtol": 0, "atol": 0})


@EACH_INPUT_OF_TORCH
def test_steps_equal_those_of_torch(info, given):
    """``swapped`` replaces names of torch.optim; torch's own classes stay in its modules."""
    theirs = getattr(sys.modules[f"torch.optim.{info.name.lower()}"], info.name)
    params, others, before = ([Parameter(p.detach().double()) for p in weights()] for _ in range(3))
    stepped(made(info, params, given), params, range(10))
    stepped(theirs(others, **copy.deepcopy(given.kwargs)), others, range(10))
    for p, other, start in zip(params, others, before, strict=True):
        assert (p - other).norm() <= 1e-9 * (other - start).norm()


@EACH_INPUT
def test_a_loaded_optimizer_steps_as_the_saved_one(info, given):
    params = weights()
    optimizer = made(info, params, given)
    stepped(optimizer, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    others = [Parameter(p.detach().clone()) for p in params]
    loaded = made(info, others, given)
    loaded.load_state_dict(saved)
    assert_equal(stepped(optimizer, params, range(3, 6)), stepped(loaded, others, range(3, 6)))


@EACH_INPUT
def test_copies_step_as_the_original(info, given):
    params = weights()
    optimizer = made(info, params, given)
    stepped(optimizer, params, range(3))
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        own = [p for group in copied.param_groups for p in group["params"]]
        again = [Parameter(p.detach().clone()) for p in params]
        loaded = made(info, again, given)
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert_equal(stepped(copied, own, range(3, 5)), stepped(loaded, again, range(3, 5)))
        assert {*vars(copied)} >= {k for k in vars(optimizer) if not k.startswith("_")}


@EACH_INPUT
def test_groups_have_their_own_rates(info, given):
    params = weights()
    kwargs = {k: v for k, v in given.kwargs.items() if k != "lr"}
    groups = [{"params": params[:1], "lr": 0.02}, {"params": params[1:]}]
    optimizer = info.optim_cls(groups, lr=0.001, **kwargs)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.001]
    stepped(optimizer, params, range(3))
    alone = weights()
    first = info.optim_cls(alone[:1], lr=0.02, **kwargs)
    rest = info.optim_cls(alone[1:], lr=0.001, **kwargs)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for p in alone:
            p.grad = torch.randn(p.shape, generator=generator)
        first.step()
        rest.step()
    assert_equal(params, alone, rtol=1e-5, atol=1e-6)


@EACH_INPUT
def test_all_parameters_together_step_as_each_alone(info, given):
    params, alone = weights(), weights()
    stepped(made(info, params, given), params, range(3))
    optimizers = [made(info, [p], given) for p in alone]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for p, optimizer in zip(alone, optimizers, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
    assert_equal(params, alone, rtol=1e-5, atol=1e-6)


@EACH_INPUT
def test_strides_do_not_matter(info, given):
    params, strided = weights(), weights(contiguous=False)
    assert not strided[0].is_contiguous()
    stepped(made(info, params, given), params, range(3))
    stepped(made(info, strided, given), strided, range(3))
    assert_equal(params, strided, rtol=1e-5, atol=1e-6)


@EACH_INPUT
def test_a_parameter_without_a_gradient_stays(info, given):
    params = weights()
    before = [p.detach().clone() for p in params]
    optimizer = made(info, params, given)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert not torch.equal(params[0], before[0])
    assert_equal(params[1:], before[1:])
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


@EACH_INPUT
def test_a_closure_lowers_its_loss(info, given):
    params = weights()
    optimizer = made(info, params, given)

    def closure():
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in params)
        (-loss if given.kwargs.get("maximize") else loss).backward()
        return loss

    first = optimizer.step(closure)
    for _ in range(20):
        last = optimizer.step(closure)
    assert last.item() < first.item()


@EACH_SCHEDULER
def test_schedulers_change_the_rate(info, schedulers):
    (given, *_) = info.optim_inputs_func("cpu")
    params = weights()
    optimizer = info.optim_cls(params, **{"lr": 0.05} | given.kwargs)
    running = [make(optimizer) for make in schedulers]
    rates = set()
    for seed in range(30):
        stepped(optimizer, params, [seed])
        rates.add(float(optimizer.param_groups[0]["lr"]))
        for scheduler in running:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(1.0)
            else:
                scheduler.step()
    assert len(rates) > 1


@EACH_ERROR
def test_wrong_arguments_raise_what_the_database_says(info, given, wrong):
    params = given.params if given.params is not None else weights()
    if wrong.error_type is UserWarning:
        with pytest.warns(UserWarning, match=wrong.error_regex):
            info.optim_cls(params, **given.kwargs)
    elif wrong.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR:
        with pytest.raises(wrong.error_type, match=wrong.error_regex):
            info.optim_cls(params, **given.kwargs)
    else:
        optimizer = info.optim_cls(params, **given.kwargs)
        with pytest.raises(wrong.error_type, match=wrong.error_regex):
            optimizer.step()
