"""The properties that every rule has: each function raises AssertionError if a rule lacks one."""

import copy
import dataclasses
import functools
import io
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_origin, get_type_hints
from unittest import mock

import torch
from torch import Tensor, nn

from ds_ext import ops, rules
from ds_ext.distributed import lockstep
from ds_ext.hyperparams import NonNegative
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import leaves, mapped, saved
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.testing.simulation import EXACT, Ranks, Shape, errors, gradients, weights, with_zeros

Reference = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
CLOSE = 1e-4  # the largest error in fp32, relative to the update
BOUND = 1e30  # of elements of gradients, which none exceeds


def equals_reference(rule: Any, reference: Reference, shapes: Sequence[Shape]) -> None:
    """Compares a rule with a torch optimizer, on whole parameters in fp64."""
    before, steps = weights(shapes), gradients(6, shapes)
    params = [nn.Parameter(p.clone()) for p in before]
    optimizer, ranks = reference(params), Ranks(rule, before, 1)
    for grads in steps:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        ranks.step(grads)
    _compare(rule, "equals its reference", EXACT, ranks.params, params, before)


def is_the_same_on_ranks(rule: Any, world: int, shapes: Sequence[Shape], steps: int = 10) -> Ranks:
    """Compares parameters cut over simulated ranks with whole ones, in fp64; returns the ranks."""
    before = weights(shapes)
    whole, ranks = Ranks(rule, before, 1), Ranks(rule, before, world)
    for grads in gradients(steps, shapes):
        whole.step(grads)
        try:
            ranks.step(grads)
        except ValueError as reason:
            what = "yields equally often, and sums of equal sizes, on all ranks"
            raise AssertionError(lacks(rule, f"{what}: {world} ranks, {reason}")) from reason
    for shape, p, old in zip(shapes, whole.params, before, strict=True):
        what = f"changes the weight: shape {shape}, {steps} steps (ops.apply_ writes it)"
        _require(not torch.equal(p, old), rule, what)
    what = f"is the same on {world} ranks as on one"
    advice = ", a total is missing or not used, or a mean divides by len(p) instead of shard.numel"
    _compare(rule, what, EXACT, ranks.params, whole.params, before, advice)
    for k, shards in enumerate(zip(*ranks.shards, strict=True)):
        for path, part in leaves(rule.state_spec(shards[0])):
            if part.is_shared:
                first, *others = [dict(leaves(states[k]))[path] for states in ranks.states]
                same = all(torch.equal(first, other) for other in others)
                _require(same, rule, f"has the same bits of the state {path} on all ranks")
    return ranks


def uses_its_hypers(rule: Any, shapes: Sequence[Shape]) -> None:
    """Compares steps by other values of ``lr``, and of ``weight_decay`` if the rule has it."""
    values = {"lr": (rule.lr, rule.lr / 2), "weight_decay": (0.0, 0.1)}
    for name in ("lr", "weight_decay")[: 1 + hasattr(rule, "weight_decay")]:
        first, second = (
            Ranks(dataclasses.replace(rule, **{name: value}), weights(shapes), 1)
            for value in values[name]
        )
        for grads in gradients(2, shapes):
            first.step(grads)
            second.step(grads)
        advice = f"step reads self.{name}, as in ops.apply_(…, {name}=self.{name})"
        is_same = all(map(torch.equal, first.params, second.params))
        _require(not is_same, rule, f"has another update if {name} changes ({advice})")


def only_reads_what_it_reads(rule: Any, shapes: Sequence[Shape]) -> None:
    """Compares the bits of steps with those where ``ops.read`` returns copies."""
    before, read, found = weights(shapes, torch.float32), ops.read, []
    for own in (read, lambda x, b: read(x, b).clone()):
        params, optimizer = _optimizer(rule, before)
        with mock.patch.object(ops, "read", own):
            _step(optimizer, params, gradients(3, shapes, torch.float32))
        found.append(params)
    for shape, p, other in zip(shapes, *found, strict=True):
        what = f"does not write to results of ops.read, such as by .sign_(): shape {shape}"
        _require(torch.equal(p, other), rule, what)


def keeps_its_state_spec(rule: Any, shapes: Sequence[Shape]) -> None:
    """Compares states after two steps with what ``state_spec`` declares, also on ranks."""
    for world in (1, 3):
        ranks = Ranks(rule, weights(shapes, torch.float32), world)
        for grads in gradients(2, shapes, torch.float32):
            ranks.step(grads)
        for states, shards in zip(ranks.states, ranks.shards, strict=True):
            for state, shard in zip(states, shards, strict=True):
                _check_state(rule, state, shard, torch.float32)


def yields_before_it_writes(rule: Any, shapes: Sequence[Shape]) -> None:
    """Checks ``sums_first`` of ``register`` on each rank, in five steps."""
    for world in (1, 2):
        ranks = Ranks(rule, weights(shapes, torch.float32), world)
        for grads in gradients(5, shapes, torch.float32):
            trial = copy.deepcopy(ranks)
            trial.step(grads, functools.partial(_begin, ranks, trial))
            ranks.step(grads)


def _begin(ranks: Ranks, trial: Ranks, steps: Sequence[Sequence[Any]]) -> int:
    """Advances steps of ``trial`` to their first sums, and compares its memory with ``ranks``'."""
    rule, first = ranks.rule, rules.entry_of(type(ranks.rule)).sums_first
    for r, i in ((r, i) for r in range(ranks.world) for i in range(len(ranks.shapes))):
        if first(rule, ranks.shards[r][i]):
            sums = next(lockstep.lockstep([steps[r][i]]), None)
            now, before = ([x.runs[r][i], *tensors(x.states[r][i])] for x in (trial, ranks))
            is_kept = sums is not None and all(map(torch.equal, now, before))
            what = f"yields before it writes, as sums_first says: shape {ranks.shapes[i]}"
            _require(is_kept, rule, f"{what}, step {trial.t}, {ranks.world} ranks")
    return 0


def _check_state(rule: Any, state: Any, shard: Shard, dtype: torch.dtype) -> None:
    what = f"keeps the state that state_spec declares: shape {shard.shape}, "
    spec = rule.state_spec(shard)
    _require(state.keys() <= spec.keys(), rule, f"{what}other keys, {[*state]}")
    found = dict(leaves(state))
    for path, part in leaves(saved(spec)):
        _require(path in found, rule, f"{what}{path} is missing")
        x = found[path]
        wanted = part.dtype_for(dtype)
        _require(x.dtype == wanted, rule, f"{what}{path} is {x.dtype} and not {wanted}")
        is_alike = tuple(x.shape) == part.shape
        _require(is_alike, rule, f"{what}{path} has the shape {tuple(x.shape)}, not {part.shape}")


def resumes(rule: Any, shapes: Sequence[Shape], dtype: torch.dtype = torch.float32) -> None:
    """Compares the bits of a resumed run with those of one without a break."""
    steps = gradients(5, shapes, dtype)
    params, optimizer = _optimizer(rule, weights(shapes, dtype))
    _step(optimizer, params, steps[:3])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    others, resumed = _optimizer(rule, params)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    _step(optimizer, params, steps[3:])
    _step(resumed, others, steps[3:])
    for shape, p, other in zip(shapes, params, others, strict=True):
        what = f"resumes with the same bits: shape {shape} (step keeps something outside its state)"
        _require(torch.equal(p, other), rule, what)


def works_in(rule: Any, dtype: torch.dtype, shapes: Sequence[Shape], most: float) -> None:
    """Compares 16-bit weights that have masters with fp32 weights, by gradients of equal values."""
    before = weights(shapes, dtype)
    steps = gradients(4, shapes, dtype)
    wide, optimizer = _optimizer(rule, [p.float() for p in before])
    _step(optimizer, wide, [[g.float() for g in grads] for grads in steps])
    for mode in ("stochastic", "master"):
        params, optimizer = _optimizer(rule, before, weight_update=mode)
        _step(optimizer, params, steps)
        for shape, p in zip(shapes, params, strict=True):
            finite = bool(p.isfinite().all())
            _require(finite, rule, f"works with {dtype} weights: shape {shape}, not finite")
    found = [
        optimizer.weights(p, p.detach().view(-1), optimizer.shard(p)).to(p.device).view(p.shape)
        for p in params
    ]
    _compare(rule, f"works with {dtype} weights as with fp32", most, found, wide, before)


def endures_zeros(rule: Any, shapes: Sequence[Shape]) -> None:
    """Steps by gradients with rows, columns and parameters of zeros, also with the least eps."""
    for eps in ({}, smallest_eps(type(rule))):
        params, optimizer = _optimizer(rule, weights(shapes, torch.float32), **eps)
        for _ in range(2):
            _step(optimizer, params, map(with_zeros, gradients(2, shapes, torch.float32)))
            for shape, p in zip(shapes, params, strict=True):
                found = [p, *tensors(optimizer.state.get(p, {}))]
                finite = all(bool(x.isfinite().all()) for x in found)
                what = f"stays finite where gradients are zero: shape {shape}, {eps or 'own eps'}"
                what += " (0 / 0 is NaN: torch.where(total > 0, ...) avoids it)"
                _require(finite, rule, what)
                mapped(optimizer.state.get(p, {}), shrunk)  # as after many more steps


def equals_itself_in_a_batch(rule: Any, shapes: Sequence[Shape]) -> None:
    """Compares a batch with parameters that are stepped one by one, in fp32.

    The batch reads gradients as an engine gives them: with a divisor, and with a bound.
    """
    before, steps = weights(shapes, torch.float32), gradients(4, shapes, torch.float32)
    entry = rules.entry_of(type(rule))
    params, optimizer = _optimizer(rule, before)
    shards = [Shard.whole(tuple(p.shape)) for p in params]
    for grads in steps:
        scaled = [ops.Scaled(2 * g.view(-1), 0.5, BOUND) for g in grads]
        runs = [p.detach().view(-1) for p in params]
        optimizer.update(map(RunUpdate, params, runs, scaled, shards), None)
    unbatched = dataclasses.replace(entry, batches=lambda rule, shard: False)
    with mock.patch.dict(rules.REGISTRY, {entry.rule.__name__.lower(): unbatched}):
        alone, optimizer = _optimizer(rule, before)
        _step(optimizer, alone, steps)
    _compare(rule, "is the same in a batch as alone", CLOSE, params, alone, before)


def smallest_eps(rule: type) -> dict[str, Any]:
    """Returns hyper-parameters with which no small constant keeps a divisor above zero."""
    hints = get_type_hints(rule, include_extras=True)
    found: dict[str, Any] = {}
    for key in {"eps", "eps1", "eps2"} & hints.keys():
        allows_zero = NonNegative in (hints[key], *get_args(hints[key]))
        least = 0.0 if allows_zero else 1e-300  # 0 in fp32
        count = len(get_args(hints[key])) if get_origin(hints[key]) is tuple else 0
        found[key] = (least,) * count if count else least
    return found


def shrunk(x: Tensor) -> Tensor:
    """Makes the smallest numbers of a part of a state those that fp32 can hold, or 0."""
    if x.is_floating_point():
        x[(x.abs() > 0) & (x.abs() < 1e-25)] = 1e-45
    return x


def tensors(state: Any) -> list[Tensor]:
    """Returns the floating point tensors of a state, nested in dicts."""
    found = [x for _, x in leaves(state) if isinstance(x, Tensor)]
    return [x for x in found if x.is_floating_point()]


def _optimizer(
    rule: Any, before: Sequence[Tensor], **changed: Any
) -> tuple[list[nn.Parameter], RuleOptimizer]:
    """Copies of some weights, and the optimizer that steps them by a rule."""
    params = [nn.Parameter(p.detach().clone()) for p in before]
    own = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    kind = OPTIMIZERS[rules.entry_of(type(rule)).rule.__name__.lower()]
    return params, kind(params, **own | changed)


def _step(optimizer: RuleOptimizer, params: Sequence[nn.Parameter], steps: Any) -> None:
    for grads in steps:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(p.dtype, copy=True)
        optimizer.step()


def _compare(
    rule: Any,
    what: str,
    most: float,
    found: Sequence[Tensor],
    expected: Sequence[Tensor],
    before: Sequence[Tensor],
    advice: str = "",
) -> None:
    """Requires that the error of each parameter, relative to its update, is at most ``most``."""
    for p, error in zip(before, errors(found, expected, before), strict=True):
        text = f"error {error:.1e} of the update, allowed {most:g}{advice}"
        _require(error <= most, rule, f"{what}: shape {tuple(p.shape)}, {text}")


def _require(holds: bool, rule: Any, what: str) -> None:
    if not holds:
        raise AssertionError(lacks(rule, what))


def lacks(rule: Any, what: str) -> str:
    """Returns the message of a missing property, which ``what`` says after the word "it"."""
    return f"{type(rule).__name__} lacks a property of every rule: it {what}."
