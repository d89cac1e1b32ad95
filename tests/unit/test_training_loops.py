"""Loops written for other optimizers: gradient scalers, torch's clipping, zero_grad, loading.

Gradients that are discarded: tests/scenarios.
"""

import copy
import functools
import logging
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

import ds_ext
from ds_ext.backward import fused_backward
from ds_ext.distributed import lockstep
from ds_ext.ops.shard import Shard
from ds_ext.optimizer.updates import RunUpdate
from tests.common import models
from tests.common.plain import fuse

make = functools.partial(models.layers, 5, 7, 3)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().sum()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_gradient_scaler_is_refused_before_a_weight_moves():
    model, other = make(), make()
    fused, optimizer = fuse(model)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError, match="GradScaler.*bfloat16.*torch_autocast"):
        scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.scale([loss_of(other, 0), (loss_of(model, 0),)])
    assert all(map(torch.equal, model.parameters(), other.parameters()))

    # Who does not scale, or scales the loss of another model, is left alone.
    torch.amp.GradScaler("cpu", enabled=False).scale(loss_of(model, 0))
    scaler.scale(loss_of(other, 0)).backward()
    assert other[0].weight.grad.norm() > 0
    fused.remove()
    scaler.scale(loss_of(model, 0)).backward()


@pytest.mark.parametrize("max_norm", [0.0, 1e-3])
def test_clipping_by_torch_to_what_is_set_tells_the_norm(max_norm):
    model, other = make(), make()
    policy = "sharded" if max_norm else "fused"
    fused, optimizer = fuse(model, max_grad_norm=max_norm, gradient_policy=policy)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model, step).backward()
        loss_of(other, step).backward()
        bound = max_norm or torch.inf
        expected = clip_grad_norm_(other.parameters(), bound)
        assert float(clip_grad_norm_(model.parameters(), bound)) == pytest.approx(float(expected))
        for params, norm, kind in (
            (model.parameters(), 0.5, 2.0),  # another norm
            (model.parameters(), bound, 1.0),  # another kind
            (list(model.parameters())[1:], bound, 2.0),  # of some
        ):
            now = f"\\(max_grad_norm is {max_norm:g}\\)" if max_norm else "cannot clip them\\. Inst"
            with pytest.raises(RuntimeError, match=now):
                clip_grad_norm_(params, norm, kind)
        plain.step(), plain.zero_grad()
        optimizer.step()
        assert fused.norm == pytest.approx(float(expected))
    both = [*model.parameters()], [*other.parameters()]
    torch.testing.assert_close(*both, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_one_model", [False, True])
@pytest.mark.parametrize("policy", ["fused", "sharded"])
def test_a_head_that_torch_steps_is_clipped_by_its_own_call(policy, is_one_model):
    """A norm of both would scale the head only, because the body's step uses its own norm."""
    model, reference = make(), make()
    stepped = model if is_one_model else model[0]
    optimizer = ds_ext.LOMO(model[0].parameters(), lr=0.1)
    fused = ds_ext.fuse_into_backward(stepped, optimizer, max_grad_norm=0.1, gradient_policy=policy)
    fused.backward(loss_of(model, 0))
    loss_of(reference, 0).backward()
    for bound in (0.1, torch.inf):
        with pytest.raises(RuntimeError, match="Clip the others by a call of their own, freeze"):
            clip_grad_norm_(model.parameters(), bound)
    for part in (0, 2):
        clipped, expected = (clip_grad_norm_(m[part].parameters(), 0.1) for m in (model, reference))
        assert float(clipped) == pytest.approx(float(expected))
    assert torch.equal(model[2].weight.grad, reference[2].weight.grad)
    model[2].zero_grad()
    assert clip_grad_norm_(model.parameters(), 0.1) > 0  # as with frozen parameters
    optimizer.step()
    expected = make()[0].weight - 0.1 * reference[0].weight.grad
    torch.testing.assert_close(model[0].weight, expected)


@pytest.mark.parametrize("policy", ["fused", "sharded"])
def test_clipping_by_torch_is_refused_and_tells_what_to_set(policy):
    model, other = make(), make()
    fused, optimizer = fuse(model, gradient_policy=policy)
    loss_of(model, 0).backward()
    for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_, clip_grad_value_):
        with pytest.raises(
            RuntimeError, match=r"\(\.\.\., max_grad_norm=\.\.\.\) or clip_value\. The norm"
        ):
            clip(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="max_grad_norm"):
        clip_grad_norm_(parameters=model[0].weight, max_norm=1.0)
    with pytest.raises(RuntimeError, match="max_grad_norm"):
        clip_grad_norm_(model.parameters(), 0.0)  # torch makes all gradients zero
    with pytest.raises(RuntimeError, match=r"utils\.clip_grads_with_norm_.*max_grad_norm"):
        nn.utils.clip_grads_with_norm_(model.parameters(), torch.inf, torch.tensor(1.0))

    loss_of(other, 0).backward()
    before = other[0].weight.grad.norm()
    assert clip_grad_norm_(other.parameters(), max_norm=1e-3) >= before
    clip_grad_value_(other.parameters(), 1e-6)
    assert other[0].weight.grad.abs().max() <= 1e-6
    fused.remove()
    clip_grad_norm_(model.parameters(), 1.0)


class Counted(ds_ext.MetricsCallback):
    """A subclass that calls ``super()``, as subclasses do."""

    def on_train_begin(self, *args, **kwargs):
        super().on_train_begin(*args, **kwargs)
        self.count = 0

    def on_step_end(self, *args, **kwargs):
        super().on_step_end(*args, **kwargs)
        self.count += 1


@pytest.mark.parametrize("kind", [ds_ext.MetricsCallback, Counted])
def test_the_metrics_callback_and_its_subclasses_come_before_others(kind):
    optimizer = mock.Mock(**{"metrics.return_value": {"skipped_steps": 1.0, "bytes_sent": 3.0}})
    callback, other = kind(), TrainerCallback()
    handler = CallbackHandler([other, callback], None, None, optimizer, None)
    args = TrainingArguments(output_dir="unused", report_to="none")
    state, control, logs = TrainerState(), TrainerControl(), {"loss": 1.0}
    state.log_history.append(dict(logs))
    handler.on_train_begin(args, state, control)
    assert handler.callbacks.index(callback) == 0 and handler.callbacks.count(other) == 1
    handler.on_step_end(args, state, control)
    handler.on_log(args, state, control, logs)
    assert logs["skipped_steps"] == 1.0 and logs["bytes_sent"] == 3.0
    with pytest.raises(RuntimeError, match="pass the callback to Trainer"):
        callback.on_train_begin(args, state, control, optimizer=optimizer)


def test_what_was_stepped_stays_and_a_warning_says_so(caplog):
    def fail(grad):
        raise InterruptedError

    model = make()
    _, optimizer = fuse(model, bucket_size=1)
    h = model[0](torch.ones(4, 5))
    h.register_hook(fail)
    with pytest.raises(InterruptedError):
        model[1:](h).square().sum().backward()
    with caplog.at_level(logging.WARNING, "ds_ext"):
        optimizer.zero_grad()
        optimizer.zero_grad()
    (message,) = (record.getMessage() for record in caplog.records)
    assert "already updated 2 of 4 parameters" in message and "sharded" in message


@pytest.mark.parametrize("is_first", [True, False])
def test_a_step_without_gradients_is_told_of_once(is_first, caplog):
    fused_backward.warn_once.cache_clear()
    model = make()
    _, optimizer = fuse(model)
    with caplog.at_level(logging.WARNING, "ds_ext"):
        if not is_first:
            model(torch.ones(4, 5)).square().sum().backward()
            optimizer.step()
            optimizer.step()  # as accelerate may
            assert not caplog.records
        optimizer.step()
        optimizer.step()
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("optimizer.step() has stepped nothing: no parameter has got")


@pytest.mark.parametrize("name", ["AdamW", "AdaLomo", "Muon"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_step_that_fails_is_not_counted(is_fused, name):
    """Its memory ran out before it wrote a weight, and the script goes on with the next batch."""
    models = [make(), make()]
    optimizers = [
        getattr(ds_ext, name).for_model(model, lr=0.01, ema_decay=0.9) for model in models
    ]
    if is_fused:
        for model, optimizer in zip(models, optimizers, strict=True):
            ds_ext.fuse_into_backward(model, optimizer)
    for step in range(3):
        with mock.patch.object(lockstep, "run", side_effect=MemoryError):
            with pytest.raises(MemoryError):
                train(models[0], optimizers[0], 9)
        models[0].zero_grad()
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, step)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        state, other = optimizers[0].state[p], optimizers[1].state[q]
        assert torch.equal(p, q) and torch.equal(state["ema"], other["ema"])
        assert state["step"] == other["step"] == 3


def test_a_failed_step_of_offloaded_weights_is_not_counted():
    """Their states are where the gradient is: "meta" stands for a GPU here."""
    param = nn.Parameter(torch.ones(4, 4))
    optimizer = ds_ext.AdamW([param])
    g = torch.ones(16, device="meta")
    update = RunUpdate(param, param.detach().view(-1), g, Shard.whole((4, 4)))
    with mock.patch.object(lockstep, "run", side_effect=MemoryError):
        with pytest.raises(MemoryError):
            optimizer.update([update], None)
    assert not optimizer.state.get(param)


def test_a_state_that_is_loaded_before_the_step_steps_kept_gradients_and_warns_of_used_ones(caplog):
    stepped = []
    for how in (None, {"gradient_policy": "sharded"}, {"bucket_size": 1}):
        model = make()
        optimizer = ds_ext.AdamW(model.parameters(), lr=0.01)
        if how is not None:
            ds_ext.fuse_into_backward(model, optimizer, **how)
        train(model, optimizer, 0)
        saved = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 1)
        loss_of(model, 2).backward()
        with caplog.at_level(logging.WARNING, "ds_ext"):
            optimizer.load_state_dict(saved)
        optimizer.step()
        stepped.append([p.detach() for p in model.parameters()])
        assert len(caplog.records) == (how == {"bucket_size": 1})
        optimizer.load_state_dict(saved)
    assert all(map(torch.equal, *stepped[:2])) and len(caplog.records) == 1
    assert "backward has already updated parameters" in caplog.text
