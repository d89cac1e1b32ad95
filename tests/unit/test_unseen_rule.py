"""A rule that nobody has seen runs on every executor, or is refused. One file adds it."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from ds_ext import ops
from ds_ext.ops.executors.table_passes import TableBatch
from ds_ext.ops.expressions import WeightStorage
from ds_ext.ops.runs import Runs
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rules import REGISTRY
from ds_ext.testing import check_rule
from tests.common import adan, needs, paths, table
from tests.common.choose import params
from tests.common.own_rule import registered
from tests.common.plain import steps

SHAPES = ((12, 8), (9,), (2, 5, 7), (1, 40))
HYPERS = {"lr": 0.05, "betas": (0.9, 0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def known():
    adan.enter()
    yield
    adan.leave()


def made(dtype=torch.float32, **more):
    params = [nn.Parameter(p) for p in table.weights(SHAPES, dtype)]
    return params, OPTIMIZERS[adan.NAME](params, **HYPERS, **more)


def error(params, grads):
    """How far off the reference, relative to the update."""
    off = update = 0.0
    for i, (p, before) in enumerate(zip(params, table.weights(SHAPES, torch.float32), strict=True)):
        wanted = adan.reference(before, [g[i] for g in grads], **HYPERS)
        off += float((p.detach().double() - wanted).square().sum())
        update += float((before.double() - wanted).square().sum())
    return (off / update) ** 0.5


@pytest.mark.parametrize("path", paths.EACH)
def test_it_steps_as_its_paper_says(path, monkeypatch):
    paths.use(monkeypatch, path)
    grads = list(table.gradients(STEPS, SHAPES, torch.float32))
    params, optimizer = made()
    steps(optimizer, params, grads)
    assert error(params, grads) < 2e-6


@pytest.mark.parametrize("path", params(["ops", "native", "kernels"], ["ops", "native"]))
def test_it_has_the_properties_of_every_rule(path, monkeypatch):
    """On any number of ranks, resumed, in a batch, in each dtype."""
    paths.use(monkeypatch, path)
    few = {"shapes": ((13, 29), (5,))}  # Triton's interpreter is slow
    check_rule(REGISTRY[adan.NAME].rule, **few if path == "kernels" else {})


@needs.triton
def test_no_moment_advances_if_a_later_run_is_unsupported(monkeypatch):
    paths.use(monkeypatch, "kernels")
    g, m, v = (Runs([torch.full((6,), x)]) for x in (1.0, 0.0, 0.0))
    batch = TableBatch([Shard.whole((6,))], device=paths.DEVICE)
    step = ops.AdamStep(ops.RootQuotient(m, v, 1e-8), g, 0.9, 0.99)
    unread = ops.Sum(ops.Sum(g, g, 1.0), g, 1.0)  # no kernel reads a sum of sums
    with pytest.raises(TypeError, match="ops.square_sums .* is_batched=False"):
        ops.square_sums((step, unread), batch, g)
    assert m.tensors[0].eq(0).all() and v.tensors[0].eq(0).all()


# Updates that add something, at places where built-in rules do not: passes that end in a result.
def adam_of_sum(x, p, m, at):
    v = ops.Runs([torch.ones(42)]) if isinstance(m, ops.Runs) else torch.ones(42)
    ops.apply_(
        p, ops.AdamStep(ops.RootQuotient(m, v, 1e-8), ops.plus(x, p, 0.5), 0.9, 0.9), at, lr=1
    )


def sums_of_sum(x, p, m, at):
    row, col = ops.row_col_square_sums(ops.plus(x, p, 0.5), at, x)
    (m.tensors[0] if isinstance(m, ops.Runs) else m)[:13] = torch.cat([row.view(-1), col.view(-1)])


def squares_in_any_order(x, p, m, at):
    pairs = [(ops.plus(x, p, 0.5), p), (p, ops.plus(x, p, 0.5))]
    pairs += [(ops.plus(x, p, 0.5), ops.plus(m, p, 0.5)), (p, p)]
    found = [total for pair in pairs for total in ops.square_sums(pair, at, x)]
    values = torch.stack([(x if isinstance(x, torch.Tensor) else x.values).view(()) for x in found])
    (m.tensors[0] if isinstance(m, ops.Runs) else m)[: len(values)] = values


SUMS = {
    "lerp_of_sum": lambda x, p, m, at: ops.lerp_(m, ops.plus(x, p, 0.5), 0.25, at),
    "square_lerp_of_sum": lambda x, p, m, at: ops.square_lerp_(
        m, ops.plus(x, p, 0.5), 0.0, 0.25, at
    ),
    "adam_of_sum": adam_of_sum,
    "sign_of_sum": lambda x, p, m, at: ops.apply_(
        p, ops.SignStep(m, ops.plus(x, p, 5.0), 0.9, 0.9), at, lr=0.5
    ),
    "scaled_sum": lambda x, p, m, at: ops.apply_(
        p, ops.Scaled(ops.plus(x, p, 0.5), 3.0), at, lr=0.5
    ),
    "scaled_weight": lambda x, p, m, at: ops.lerp_(m, ops.Scaled(p, 3.0), 0.5, at),
    "run_quotient_of_sum": lambda x, p, m, at: ops.apply_(
        p, ops.RunQuotient(ops.plus(x, p, 0.5), m), at, lr=0.5
    ),
    "nesterov": lambda x, p, m, at: ops.apply_(p, ops.Sum(x, m, 0.5), at, lr=0.5),
    "sums_of_sum": sums_of_sum,
    "squares_in_any_order": squares_in_any_order,
}


@pytest.mark.parametrize("is_batch", [True, False])
@pytest.mark.parametrize("path", paths.EACH[1:])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_may_stand_anywhere_in_an_update(name, path, is_batch, monkeypatch):
    """Native code and kernels add a weight last. Elsewhere plain torch evaluates the sum of a run.

    A pass over a batch is refused before it has written anything.
    """
    found = {}
    for way in ("ops", path):
        paths.use(monkeypatch, way)
        x, p, m = (w.abs() + 0.5 for w in table.weights([(42,)] * 3, torch.float32))
        given, at = (x, p, m), Shard.whole((6, 7))
        if is_batch and way == path:
            at = TableBatch([at], device=p.device)
            given = Runs([x]), WeightStorage(Runs([p])), Runs([m])
        before = torch.cat([p, m])
        try:
            SUMS[name](*given, at)
        except TypeError as error:
            assert is_batch and way == path and "is_batched=False" in str(error)
            assert name != "squares_in_any_order" and torch.equal(before, torch.cat([p, m]))
            return
        found[way] = torch.cat([p, m]).cpu()
    assert torch.allclose(*found.values(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("path", paths.EACH[1:])
def test_tables_run_the_passes_that_they_support(path, monkeypatch):
    """Native code or kernels run Adan's passes, apart from the sums that they have no form for."""
    paths.use(monkeypatch, path)
    ran = paths.passes(monkeypatch)
    params, optimizer = made()
    steps(optimizer, params, table.gradients(1, SHAPES, torch.float32))
    assert ran.count("square_sums") == ran.count("apply") == len(SHAPES)
    assert ran.count("lerp") == 2 * len(SHAPES)


ODD = {"bf16": lambda x: x.bfloat16(), "fp64": lambda x: x.double()}
ODD |= {"strided": lambda x: x.repeat_interleave(2)[::2]}
SHARD = Shard.whole((6, 7))


def apply_to(y, x, at):
    ops.apply_(WeightStorage(y) if isinstance(y, Runs) else y, x, at, lr=0.5, weight_decay=0.1)


def lerp_to_expression(make):
    """Moves x to an expression of y and x."""
    return lambda y, x, at: ops.lerp_(x, make(y, x, at), 0.5, at)


TAKING = {  # passes that read or write y
    "lerp_to": lambda y, x, at: ops.lerp_(y, x, 0.25, at),
    "lerp_from": lambda y, x, at: ops.lerp_(x, y, 0.25, at),
    "square_lerp_to": lambda y, x, at: ops.square_lerp_(y, x, 0.1, 0.25, at),
    "apply_to": apply_to,
}
READ = {  # expressions of y and x
    "sum_of_squares": lambda y, x, at: ops.Scaled(x, ops.square_sum(y, at, x)),
    "adam": lambda y, x, at: ops.AdamStep(ops.RootQuotient(y, y, 1e-3), x, 0.9, 0.99),
    "adam_quotient": lambda y, x, at: ops.RootQuotient(y, x, 1e-3),
    "sign": lambda y, x, at: ops.SignStep(y, ops.Scaled(x, 1.2), 0.9, 0.5),
    "divided": lambda y, x, at: ops.RunQuotient(x, y),
    "residual": lambda y, x, at: ops.Residual(ops.RunQuotient(x, x), y, 0.5),
    "decayed": lambda y, x, at: ops.Scaled(x, ops.square_sum(ops.Sum(x, y, 0.5), at, x)),
}
TAKING |= {name: lerp_to_expression(make) for name, make in READ.items()}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("path", paths.EACH[1:])
@pytest.mark.parametrize("name", TAKING)
def test_tables_read_no_tensor_of_another_dtype_or_with_gaps(name, path, kind, monkeypatch):
    """They read and write by address, where such a tensor would be other numbers, or none."""
    found = {}
    for way in ("ops", path):
        paths.use(monkeypatch, way)
        y, x = (w.abs() + 0.5 for w in table.weights([(42,)] * 2, torch.float32))
        y = ODD[kind](y)
        TAKING[name](y, x, SHARD)
        found[way] = torch.cat([y.float(), x]).cpu()
    most = 1e-2 if kind == "bf16" else 1e-5  # native code rounds some bf16 numbers to nearest
    assert torch.allclose(*found.values(), rtol=most, atol=most)


@pytest.mark.parametrize("path", paths.EACH[1:])
def test_statistics_of_another_dtype_are_right_too(path, monkeypatch):
    found = {}
    for way in ("ops", path):
        paths.use(monkeypatch, way)
        (x,) = table.weights([(42,)], torch.float32)
        row, col = torch.full((1, 6), 0.5), torch.full((1, 14), 0.25)[:, ::2]
        row = row.double()
        sums = ops.weighted_square_sums(x, row, 1e-3, 0.9, SHARD, x)
        row_col = ops.row_col_square_sums(x, SHARD, x)
        factors = ops.factors_(row.float(), col, row_col, 1e-3, 0.9, 1.0, SHARD)
        u = ops.Quotient(x, factors[0].double(), factors[1].repeat_interleave(2, 2)[..., ::2])
        found[way] = [*sums, *factors, col, ops.square_sum(u, SHARD, x)]
    for a, b in zip(*found.values(), strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=1e-5)


def momentum(self, p, g, s, t, shard):
    ops.lerp_(s["m"], g, 0.5, shard)
    ops.apply_(p, s["m"], shard, lr=self.lr)


def own_steps(params, gradients):
    """Steps by the rule that is registered."""
    optimizer = OPTIMIZERS["own"](params)
    steps(optimizer, params, gradients)
    return optimizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("is_batched", [True, False])
@pytest.mark.parametrize("path", paths.EACH)
def test_a_state_may_have_any_dtype(path, is_batched, dtype, monkeypatch):
    paths.use(monkeypatch, path)
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((1000,), (30, 40), (7,))]
    with registered(momentum, is_batched, dtype):
        optimizer = own_steps(params, [[torch.ones_like(p) for p in params]] * 3)
    for p in params:
        assert optimizer.state[p]["m"].dtype == dtype
        assert torch.allclose(optimizer.state[p]["m"].double(), torch.tensor(0.875).double())
        assert torch.allclose(p, torch.tensor(-0.1 * (0.5 + 0.75 + 0.875)), rtol=1e-5)


@pytest.mark.parametrize("path", paths.EACH[1:])
def test_factors_that_no_table_reads_are_refused_in_a_batch(path, monkeypatch):
    paths.use(monkeypatch, path)

    def step(self, p, g, s, t, shard):
        u = ops.unit_quotient(g, shard, g)
        wide = Runs((u.row.values.double(),), firsts=u.row.offsets // 4)
        u = ops.normalize_rows(replace(u, row=wide), ops.square_sum(g, shard, g), 1e-8, shard)
        ops.apply_(p, u, shard, lr=self.lr)

    params = [nn.Parameter(torch.zeros(shape)) for shape in ((30, 40), (20, 40))]
    with registered(step, is_batched=True):
        with pytest.raises(TypeError, match="ops.normalize_rows .* is_batched=False"):
            own_steps(params, [[torch.ones_like(p) for p in params]])


# Functions of the square sums of weights and gradients, by which a rule multiplies its gradient.
SCALES = {
    "sqrt": lambda p, g: torch.sqrt(p) / (torch.sqrt(g) + 1),
    "power": lambda p, g: (p / (g + 1)) ** 0.25,
    "compared": lambda p, g: (p >= g) * 0.5 + (p < 1) * 0.25 + 0.125,
    "where": lambda p, g: torch.where((p > 1) & (g > 1), p / g, 0.5),
    "clamp": lambda p, g: torch.clamp(1 / g, max=0.5).clamp(min=p.new_tensor(0.1)),
    "maximum": lambda p, g: 1 / torch.maximum(p.rsqrt(), g.sqrt()).add(1),
}


def scaled_steps(scale, path, monkeypatch):
    def step(self, p, g, s, t, shard):
        p_sq, g_sq = yield ops.square_sums((p, g), shard, g)
        ops.apply_(p, ops.times(g, scale(p_sq, g_sq)), shard, lr=self.lr)

    paths.use(monkeypatch, path)
    start = table.weights(((6, 7), (40,), (3, 5)), torch.float32)
    params = [nn.Parameter(p * (i + 0.1)) for i, p in enumerate(start)]
    with registered(step, is_batched=True):
        own_steps(params, [[2 - p.detach() for p in params]])
    return [p.detach().cpu() for p in params]


@pytest.mark.parametrize("path", paths.EACH[1:])
@pytest.mark.parametrize("name", SCALES)
def test_a_rule_computes_with_its_scalars_in_torch_on_every_device(name, path, monkeypatch):
    expected = scaled_steps(SCALES[name], "ops", monkeypatch)
    found = scaled_steps(SCALES[name], path, monkeypatch)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@dataclass(frozen=True)
class Centered:
    """2 x − 1e-3 · the sum of squares of x: a pass inside an expression."""

    x: torch.Tensor

    def block(self, b):
        doubled = ops.read(ops.Scaled(self.x, 2.0), b)
        inner = Shard.whole((len(self.x),))
        total = ops.square_sum(ops.Scaled(ops.Scaled(self.x, 0.5), 2.0), inner, self.x)
        return doubled - 1e-3 * total


@pytest.mark.parametrize("path", paths.EACH)
def test_an_expression_may_run_a_pass(path, monkeypatch):
    """It leaves the block that the pass around it has read as it is."""
    paths.use(monkeypatch, path)
    monkeypatch.setattr("ds_ext.ops.shard.BLOCK", 300)
    x, p = (w + 0.5 for w in table.weights([(1000,)] * 2, torch.float32))
    before = p.clone()
    ops.apply_(p, Centered(x), Shard.whole((1000,)), lr=0.5, weight_decay=0.1)
    expected = before - 0.5 * (2 * x - 1e-3 * x.square().sum() + 0.1 * before)
    assert torch.allclose(p, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("path", paths.EACH)
def test_a_bound_of_zero_is_a_bound(path, monkeypatch):
    paths.use(monkeypatch, path)
    x, m, v = (w.abs() + 0.5 for w in table.weights([(42,)] * 3, torch.float32))
    for u in (x, ops.RunQuotient(x, v), ops.RootQuotient(m, v, 1e-3)):
        assert ops.square_sum(ops.Scaled(u, 3.0, 0.0), SHARD, x) == 0
        assert ops.square_sum(ops.Scaled(u, 3.0, None), SHARD, x) > 0
