"""Writing weights: unbiased or exact, however a parameter is cut; the random bits of rounding."""

import functools
import itertools

import pytest
import torch
from torch import nn

from ds_ext import AdaLomo
from ds_ext.checkpoint import resharding
from ds_ext.checkpoint.pieces import Pieces
from ds_ext.distributed import lockstep
from ds_ext.ops import rounding, sixteen_bit
from ds_ext.ops.shard import Shard
from ds_ext.ops.sixteen_bit import RoundingConfig
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rules import REGISTRY
from ds_ext.rules.apollo import APOLLO
from tests.common import choose, optimizer_ranks, table
from tests.common.hypers import FOR_ALL, Table
from tests.common.plain import steps
from tests.common.states import from_file

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
halves = pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
MODES = ["stochastic", "nearest", "master", "master24"]
MASTERS = ["master", "master24"]
modes = pytest.mark.parametrize("mode", MODES)

SETTINGS = Table(
    {"lr": 1e-3, "weight_decay": 0.1, "relative_step": False, "beta1": 0.9},
    {"lomo": {"lr": 0.01}, "galoreadamw": {"lr": 1e-2, "rank": 3, "update_proj_gap": 3}},
)
GROUPED = ("flashadamw",)  # whose sums complete groups of elements that cuts go through
SHAPES = ((), (5,), (13, 29), (4, 3, 5))


def neighbours(x, half):
    """The largest 16-bit number below or at ``x`` and the smallest above or at it, as fp64."""
    codes = torch.arange(-(2**15), 2**15).to(torch.int16).view(half).double()
    grid = codes[codes.isfinite()].unique()
    at = torch.searchsorted(grid, x.double(), right=True) - 1
    low = grid[at.clamp(min=0)]
    return low, torch.where(low == x, low, grid[(at + 1).clamp(max=len(grid) - 1)])


# Where a number lies between its neighbours: among them the subnormal ones of both formats.
VALUES = [1.0, -1.0, 0.3, 1000.0, 6e4, 2**-14, -(2**-14), 3e-5, -7e-6, 1e-7, -2e-8, 1e-9]
TINY = [1e-38, -3e-39, 2e-40, 9e-41, -1e-41]


@halves
@pytest.mark.parametrize("value", [v * (1 + 2**-9) for v in VALUES] + TINY)
def test_a_value_goes_to_its_two_neighbours_and_on_average_nowhere(value, half):
    x = torch.full((100_000,), value)
    rounded = rounding.ROUND[half](x.clone(), key=3, start=0).double()
    (low,), (high,) = neighbours(x[:1], half)
    assert set(rounded.tolist()) <= {low.item(), high.item()}
    assert torch.equal(rounded.to(half).double(), rounded)
    share = ((x[0].double() - low) / (high - low)).item() if high > low else 0.0
    error = 4 * (share * (1 - share) / len(x)) ** 0.5 + 2**-16
    assert (rounded > low).double().mean().item() == pytest.approx(share, abs=error)


@halves
def test_what_16_bits_can_hold_stays(half):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(half).float()
    numbers = every[~every.isnan()]
    assert numbers.isinf().sum() == 2
    rounded = rounding.ROUND[half](numbers, 1, 0)
    assert torch.equal(rounded, numbers) and torch.equal(rounded.signbit(), numbers.signbit())
    for bits in (0x7FFFFFFF, -1, 0x7F800001):  # where noise would carry into the sign
        nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        assert rounding.ROUND[half](nan, 1, 0).isnan().all()


@halves
def test_what_is_finite_does_not_become_infinite(half):
    most = torch.finfo(half).max
    above = torch.tensor([most * (1 + 2**-12), torch.finfo(torch.float32).max]).repeat(1000)
    assert set(rounding.ROUND[half](above, 5, 0).to(half).tolist()) == {most}
    assert set(rounding.ROUND[half](-above, 5, 0).to(half).tolist()) == {-most}


@modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_weights_are_written_as_they_are(dtype, mode):
    p, s = torch.zeros(3, dtype=dtype), {"step": 1}
    assert sixteen_bit.weight(p, s, RoundingConfig(mode), 0, Shard.whole((3,))) is p
    assert s == {"step": 1}


def master(half, n, mode="master"):
    """A weight of ``n`` elements with its master, its run, its state and its only block."""
    shard = Shard.whole((n,))
    run, s = torch.zeros(n, dtype=half), {"step": 1}
    written = sixteen_bit.weight(run, s, RoundingConfig(mode), 0, shard)
    (b,) = shard.blocks()
    return written, run, s, b


def patterns():
    """fp32 numbers of all signs and exponents, ties of both formats, subnormals, inf, nan."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (100_000,), generator=generator)
    high = torch.arange(-(2**15), 2**15) * 2**16
    ties = [high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    return torch.cat([random, *ties]).to(torch.int32).view(torch.float32)


@halves
def test_a_master_has_all_bits_of_an_fp32(half):
    x = patterns()
    written, run, s, b = master(half, len(x))
    written.write_(b, x.view(b.shape))
    back = written.block(b).view(-1)
    same = back.view(torch.int32) == x.view(torch.int32)
    assert (same | x.isnan()).all() and back.isnan().equal(x.isnan())
    assert s["master"].dtype == {torch.bfloat16: torch.int16, torch.float16: torch.float32}[half]
    # What the model computes with is the nearest, of two the further from zero.
    nearest = x.to(half)
    assert run.isnan().equal(nearest.isnan())
    assert run[nearest.isinf()].equal(nearest[nearest.isinf()])
    off = (run.double() - x.double()).abs() - (nearest.double() - x.double()).abs()
    assert off[nearest.isfinite()].abs().max() == 0


def test_a_bf16_master_rounds_halves_away_from_zero():
    tie = 1 + 2**-8
    written, run, s, b = master(torch.bfloat16, 2)
    written.write_(b, torch.tensor([tie, -tie]).view(b.shape))
    assert run.tolist() == [1 + 2**-7, -1 - 2**-7] and s["master"].tolist() == [-(2**15)] * 2


def test_an_fp16_weight_that_was_changed_by_others_counts():
    written, run, s, b = master(torch.float16, 4)
    x = torch.tensor([0.1, 1e6, torch.nan, 0.3])
    written.write_(b, x.view(b.shape))
    run[3] = 5.0
    back = written.block(b).view(-1)
    assert back[:2].equal(x[:2]) and back[2].isnan() and back[3] == 5


# The master of 24 bits. The published one (arXiv 2602.23349), in fp64, is what it is compared with.


def half_spacings(w):
    """Half the spacing of the numbers of its format at each finite weight, fp64."""
    format = torch.finfo(w.dtype)
    _, exponent = w.double().abs().clamp(min=format.smallest_normal).frexp()
    return format.eps / 4 * 2.0 ** exponent.double()


def published(x, half):
    """Weights, their errors and the numbers that these stand for, fp64."""
    w = x.to(half)
    part = half_spacings(w) / 127
    scaled = (x.double() - w.double()) / part
    errors = scaled.sign() * (scaled.abs() + 0.5).floor()
    return w, scaled, errors, w.double() + errors * part


@halves
def test_8_more_bits_are_those_published(half):
    x = patterns()
    written, run, s, b = master(half, len(x), "master24")
    held = written.write_(b, x.clone().view(b.shape)).view(-1)
    w, scaled, errors, numbers = published(x, half)
    q, finite = s["master"].double(), w.isfinite()
    assert s["master"].dtype == torch.int8 and run.isnan().equal(w.isnan())
    assert run.view(torch.int16)[~w.isnan()].equal(w.view(torch.int16)[~w.isnan()])
    assert held[~finite].nan_to_num(7.0).equal(w[~finite].float().nan_to_num(7.0))
    assert (q[~finite] == 0).all()
    # Halves, and what is as near to them as 0.49999 and fp32 can tell, go towards the weight.
    apart = finite & (q != errors)
    assert ((scaled[apart].abs() % 1 - 0.5).abs() < 2e-5).all()
    assert ((errors - q) * scaled.sign())[apart].eq(1).all()
    # What ±127 stands for is a quarter of a part nearer, and none more than half a part off.
    part, ulp = half_spacings(w) / 127, torch.finfo(torch.float32).eps * held.abs().double()
    alike = finite & (q == errors)
    off = (held.double() - numbers).abs() - torch.where(q.abs() == 127, part / 4, 0)
    assert alike.sum() > 0.9 * finite.sum() and (off <= ulp + 2**-150)[alike].all()
    assert ((held.double() - x.double()).abs() <= part * 0.50002 + ulp + 2**-150)[finite].all()


@halves
def test_a_pair_written_from_what_it_stands_for_is_that_pair(half):
    """So that a checkpoint, which holds numbers, gives back the weights that the model had."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(half)
    every = every[every.isfinite()][::7]
    spacing = 2 * half_spacings(every)
    shares = torch.linspace(-0.5, 0.5, 257, dtype=torch.float64)
    for share in (*shares, 0.499, -0.499):  # errors of ±127 that are no ties
        written, run, s, b = master(half, len(every), "master24")
        first = written.write_(b, (every.double() + share * spacing).float().view(b.shape)).clone()
        pairs = run.clone(), s["master"].clone()
        assert written.write_(b, first.clone()).equal(first)
        assert run.view(torch.int16).equal(pairs[0].view(torch.int16)), share
        assert s["master"].equal(pairs[1]), share


@pytest.mark.supports("bf16 weights", stage=None, optimizer="name")
@pytest.mark.parametrize(
    "name, half",
    choose.params(
        itertools.product(REGISTRY, HALVES.values()),
        choose.spread(REGISTRY, [(half,) for half in HALVES.values()]),
    ),
)
def test_steps_with_a_master_have_the_bits_of_fp32(name, half, monkeypatch):
    drawn = APOLLO.drawn  # bf16 for bf16 gradients alone
    monkeypatch.setattr(APOLLO, "drawn", lambda *args: drawn(*args).to(half).float())
    shapes = [shape for shape in SHAPES if REGISTRY[name].any_shape or len(shape) == 2]
    before = table.weights(shapes, half)
    kept = [nn.Parameter(p.clone()) for p in before]
    exact = [nn.Parameter(p.float()) for p in before]
    optimizers = [
        OPTIMIZERS[name](params, **SETTINGS[name], weight_update=mode)
        for params, mode in ((kept, "master"), (exact, "nearest"))
    ]
    for gradients in table.gradients(40, shapes, half):
        for params, optimizer in zip((kept, exact), optimizers, strict=True):
            steps(optimizer, params, [gradients])
        for p, q in zip(kept, exact, strict=True):
            assert number(optimizers[0], p).equal(q)
    assert not any(a.equal(b) for a, b in zip(kept, before, strict=True))


def number(optimizer, param):
    """The number that a weight and its master stand for, as a checkpoint has it."""
    run = param.detach().view(-1)
    return optimizer.weights(param, run, Shard.whole(tuple(param.shape))).view(param.shape)


CUTS = list(itertools.product(MODES, HALVES.values(), [1, 2, 3, 7]))


@pytest.mark.parametrize("name, mode, half, world", choose.paired(FOR_ALL, CUTS))
def test_a_sharded_step_has_the_bits_of_a_whole_one(name, mode, half, world, monkeypatch):
    """Given the same totals: sums in another order may differ in their last bit."""
    monkeypatch.setattr(Shard, "holds_rows", property(lambda _: False))  # as many rounds
    weights = table.weights(SHAPES, half)

    def make(params):
        return OPTIMIZERS[name](params, **SETTINGS[name], weight_update=mode, seed=3)

    whole, ranks = (optimizer_ranks.made(make, weights, n) for n in (1, world))
    for gradients in table.gradients(5, SHAPES, half):
        with torch.no_grad():
            first, *others = [rank.begin(gradients) for rank in (*whole, *ranks)]
            if name in GROUPED:  # of one number and zeros, and none for the whole
                assert lockstep.simulate([first]) == 0
                lockstep.simulate(others)
            else:
                answer_alike([first, *others])
    found, expected = optimizer_ranks.whole(ranks), optimizer_ranks.whole(whole)
    assert all(map(torch.equal, found, expected))
    assert not all(map(torch.equal, expected, weights))


def answer_alike(begun):
    """Runs the rules of a whole and of its ranks, the ranks' totals being the whole's."""
    flats = (lockstep.lockstep(rules) for rules in begun)
    for whole, *ranks in zip(*flats, strict=True):
        assert (torch.stack(ranks).sum(0) - whole).norm() <= 1e-4 * whole.norm()
        for flat in ranks:
            flat.copy_(whole)


def rank_of(values, **hypers):
    (rank,) = optimizer_ranks.made(functools.partial(AdaLomo, **hypers), values, 1)
    return rank


def trained(mode, half, gradients, seed=5):
    rank = rank_of(table.weights(SHAPES, half), lr=1e-3, weight_update=mode, seed=seed)
    optimizer_ranks.step([rank], *gradients)
    return rank


def test_a_seed_changes_the_bits_of_stochastic_rounding_alone():
    gradients = table.gradients(3, SHAPES, torch.bfloat16)

    def run(mode, seed):
        return torch.cat(trained(mode, torch.bfloat16, gradients, seed).runs)

    for mode in MODES:
        assert run(mode, 0).equal(run(mode, 0))
        assert run(mode, 0).equal(run(mode, 1)) == (mode != "stochastic")


FORMS = [MASTERS, MASTERS[::-1], (*MASTERS[1:], "nearest"), *((mode, mode) for mode in MODES)]


@halves
@pytest.mark.parametrize("mode, other", FORMS)
def test_a_checkpoint_goes_on_with_the_same_bits_also_in_another_form(mode, other, half):
    """As if the form was chosen between steps."""
    gradients = table.gradients(5, SHAPES, half)
    kept = trained(mode, half, gradients[:4])
    before = kept.weights
    saved = from_file(resharding.save(kept.optimizer, kept.owned))
    saved["groups"][0]["weight_update"] = other
    resumed = rank_of([torch.zeros(shape, dtype=half) for shape in SHAPES])
    resharding.load_state(Pieces([saved]), resumed.optimizer, resumed.owned)
    resharding.load_weights(Pieces([saved]), resumed.optimizer, resumed.owned)
    kept.optimizer.param_groups[0]["weight_update"] = other
    for rank in (kept, resumed):
        for p, run in zip(rank.params, rank.runs, strict=True):
            sixteen_bit.prepare(run, rank.optimizer.state[p], RoundingConfig(other))
        for now, run, x in zip(rank.weights, rank.runs, before, strict=True):
            part = half_spacings(x.to(half)) / 127
            most = {"master": 0, "master24": 0.5002}.get(other, 127 * (mode != other))
            assert ((now - x).abs() <= most * part + 1e-7 * x.abs()).all()
            assert other not in MASTERS or not now.equal(run)
    for rank in (kept, resumed):
        optimizer_ranks.step([rank], gradients[4])
    assert all(map(torch.equal, kept.runs, resumed.runs))
    assert all(map(torch.equal, kept.weights, resumed.weights))
    states = kept.optimizer.state.values()
    assert all(("master" in state) == (other in MASTERS) for state in states)


def noise(n, key, start):
    bits = torch.zeros(n, dtype=torch.int32)
    rounding.add_noise_(bits, key, start)
    return bits


def test_noise_depends_on_the_element_not_on_the_cut():
    whole = noise(200_000, 17, 5)
    for start, n in ((400, 300), (2**16 - 8, 16), (2**16 - 5, 2**16 + 7), (199_999, 1)):
        assert torch.equal(whole[start : start + n], noise(n, 17, 5 + start))
    assert len(noise(0, 17, 3)) == 0


def test_noise_is_that_of_version_1_1():
    """So that a resumed run rounds in the same way. All executors read one set of constants."""
    assert noise(4, 17, 5).tolist() == [15046, 25878, 43972, 51846]
    assert noise(3, rounding.key(2**40, 3, 7), 2**16 - 1).tolist() == [14829, 64362, 19964]


def test_noise_differs_by_seed_and_parameter_and_is_uniform():
    seeds = [0, 1, 2, 7, 2**31, 2**32, 2**32 + 1, 2**64]
    keys = {rounding.key(s, n, t): s for s in seeds for n in range(400) for t in range(20)}
    assert len(keys) == 400 * 20 * len(seeds)
    for seed in seeds:
        of_seed = [key for key, s in keys.items() if s == seed][: 20 * 100 : 20]
        draws = [noise(4096, key, 0) for key in of_seed]
        high = torch.stack(draws).flatten().div(4096, rounding_mode="floor")
        expected = len(draws) * 4096 / 16
        # chi-square, 15 degrees, p = 1e-4, for there are eight seeds
        assert ((high.bincount(minlength=16) - expected) ** 2 / expected).sum() < 44.3
        neighbours = torch.corrcoef(torch.stack(draws[:2]).double())[0, 1]
        assert abs(neighbours) < 4 / 4096**0.5
    first = [noise(4096, rounding.key(s, 0, 1), 0) for s in seeds]
    apart = torch.corrcoef(torch.stack(first).double()) - torch.eye(len(seeds))
    assert apart.abs().max() < 5 / 4096**0.5


@pytest.mark.parametrize("stride, most", [(1, 0.1), (2, 6), (3, 7), (4, 7)])
def test_roundings_of_an_element_are_evenly_spread_over_steps(stride, most):
    """The variance of the error of 256 moves by 1/32: independent numbers give 7.75."""
    for dimension in (0, 1):
        keys = [rounding.key(4, 2, stride * t, dimension) for t in range(1, 257)]
        errors = sum(noise(2**16, key, 0) >= 2**16 - 2**11 for key in keys) - 8.0
        assert abs(errors.mean()) < 1e-3 and errors.square().mean() < most
