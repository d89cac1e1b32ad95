"""A bucket's votes and its plan, kept from step to step, follow all that they depend on."""

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext.backward.receivers import Stepper
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import Replicated
from ds_ext.ops.executors import unbatched
from ds_ext.optimizer import plain_step
from tests.common import needs, paths
from tests.common.spies import noted


def made():
    """Parameters and their optimizer: rounds check the first two, and AdamW's need votes."""
    params = [nn.Parameter(torch.ones(shape)) for shape in ((6, 4), (2, 6, 4), (6, 4))]
    groups = [{"params": params[:2]}, {"params": params[2:], "type": "AdamW"}]
    return params, ds_ext.SCALE(groups, momentum=0.0, norm_axis="column")


def move_one_parameter_and_add_another(optimizer):
    first, second = optimizer.param_groups
    second["params"] += [first["params"].pop(), nn.Parameter(torch.ones(3))]
    optimizer.follow_groups()


def change_dtype(optimizer):
    (param,) = optimizer.param_groups[1]["params"]
    param.data = param.data.double()  # no kernel reads it


CHANGES = {
    "rule": lambda optimizer: optimizer.param_groups[0].update(momentum=0.9),
    "another parameter": move_one_parameter_and_add_another,
    "experts": lambda o: setattr(o, "stacks", {o.param_groups[0]["params"][1]: 0}),
    "dtype": change_dtype,
}


@needs.triton
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_votes_follow_a_change(change, monkeypatch):
    paths.use(monkeypatch, "kernels")
    (params, optimizer), placement = made(), Replicated(None)
    layout = Layout(None, {p: str(i) for i, p in enumerate(params)}, lambda _: placement)
    stepper = Stepper(optimizer, layout, has_bounds=False)
    before = stepper.voted_params(params)
    assert before.device == {2} and not before.host
    optimizer.param_groups[0]["lr"] = 0.5
    assert stepper.voted_params(params) is before
    change(optimizer)
    assert stepper.voted_params(params) != before
    for bucket in (params, params[:1], params[1:], params[::-1]):
        new = Stepper(optimizer, layout, has_bounds=False)
        assert stepper.voted_params(bucket) == new.voted_params(bucket)


@pytest.mark.parametrize("path", paths.EACH[1:])
def test_the_table_of_a_bucket_of_gradients_is_kept(path, monkeypatch):
    paths.use(monkeypatch, path)
    made = []
    noted(monkeypatch, unbatched, "new_table", lambda *given: made.append(given))
    for sizes in ((5, 3), (3, 5), (5, 3)):
        runs = [torch.full((n,), 2.0) for n in sizes]
        assert unbatched.square_sums_of(runs).tolist() == [4 * n for n in sizes]
    assert len(made) == 2  # one for each order of sizes


def test_a_plan_of_another_rule_never_fits_again(monkeypatch):
    """Not even after it was asked once."""
    paths.use(monkeypatch, "native")
    params, optimizer = made()
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    ((_, plan),) = optimizer._plans.items()
    updates, states = plain_step.updates(params), [optimizer.state[p] for p in params]
    optimizer.param_groups[0]["lr"] = 0.5
    assert plan.fits(optimizer, updates, states) and plan.rules[0].lr == 0.5
    optimizer.param_groups[0]["norm_axis"] = "row"
    for _ in range(2):
        assert not plan.fits(optimizer, updates, states)
