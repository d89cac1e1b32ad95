"""Muon on simulated ranks is torch.optim.Muon on whole matrices, whose bf16 is made fp64 here."""

import dataclasses
import functools

import pytest
import torch

from ds_ext.distributed import layout, lockstep
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import leaves
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.selftest import Alone
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.planner import memory, models
from ds_ext.rules import muon, newton_schulz
from ds_ext.rules.muon import Muon
from tests.common import low_rank, paths, plain, table
from tests.common.authors import rounded
from tests.common.choose import params
from tests.common.simulated import Formula, Ranks, errors, ranks_after
from tests.common.table import WORLDS

STEPS = 4
SHAPES = ((13, 29), (29, 13), (16, 16), (1, 7), (7, 1), (1, 1), (3, 5), (64, 33), (96, 4))
# Of the update: the bounds that the rule promises whatever the spectrum.
BOUNDS = {"fp32": 1e-3, "bf16": 1e-2}

SETTINGS = {
    "defaults": {},
    "decay": {"lr": 0.02, "weight_decay": 0.3},
    "plain": {"lr": 0.02, "nesterov": False, "weight_decay": 0.0},
    "match": {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.5},
    "cubic": {"lr": 0.02, "ns_coefficients": (1.5, -0.5, 0.0), "ns_steps": 9},
    "one": {"lr": 0.02, "ns_steps": 1, "eps": 30.0},
}


def torchs(before, steps, **hypers):
    """The parameters after ``steps`` by torch.optim.Muon, which computes in their dtype here."""
    with low_rank.in_dtype(before[0].dtype):
        return plain.stepped(lambda params: torch.optim.Muon(params, **hypers), before, steps)[0]


@functools.cache
def expected(setting, shapes=SHAPES):
    return torchs(table.weights(shapes), table.gradients(STEPS, shapes), **SETTINGS[setting])


FORMULA = Formula(lambda setting: Muon(**SETTINGS[setting]), expected, SETTINGS, SHAPES, STEPS)


def hard(n, m):
    """Matrices [m, n] whose singular values lie far apart, as those of gradients do."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    u, v = torch.linalg.qr(normal(m, n))[0], torch.linalg.qr(normal(n, n))[0]
    noise = torch.rand(n - 1, generator=generator, dtype=torch.float64)
    spectra = {
        "one and noise": torch.cat([torch.ones(1).double(), 1e-2 * noise]),
        "one and little": torch.cat([torch.ones(1).double(), 1e-4 * noise]),
        "1 / k": 1 / torch.arange(1, n + 1).double(),
        "1 / k²": 1 / torch.arange(1, n + 1).double() ** 2,
        "1e-8": torch.logspace(0, -8, n).double(),
    }
    made = {name: u @ torch.diag(s) @ v.T for name, s in spectra.items()}
    return made | {"normal": normal(m, n), "rank 4": normal(m, 4) @ normal(4, n)}


def worst_by_spectrum(ns_dtype, turned, world):
    """By spectrum, the errors of one fp32 step and of torch's, whose products are bf16."""
    found = {}
    for name, g in hard(96, 200).items():
        g = (g.T if turned else g).float().contiguous()
        p = torch.zeros_like(g)
        (exact,) = torchs([p.double()], [[g.double()]], weight_decay=0.0)
        bf16, _ = plain.stepped(lambda x: torch.optim.Muon(x, weight_decay=0.0), [p], [[g]])
        ranks = Ranks(Muon(weight_decay=0.0, ns_dtype=ns_dtype), [p], world)
        ranks.step([g])
        found[name] = errors(ranks.params, [exact], [p])[0], errors(bf16, [exact], [p])[0]
    return found


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("ns_dtype", BOUNDS)
def test_the_update_is_within_the_bound_for_any_spectrum(ns_dtype, turned, world):
    for name, (mine, theirs) in worst_by_spectrum(ns_dtype, turned, world).items():
        assert mine <= BOUNDS[ns_dtype] <= 0.01 < theirs, name
        assert (ns_dtype, name) != ("fp32", "normal") or mine <= 1e-5


@pytest.mark.parametrize("turned", [False, True])
def test_bf16_products_are_within_the_bound(turned, monkeypatch):
    dtypes = paths.fast_bf16_products(monkeypatch)
    for name, (mine, _) in worst_by_spectrum("bf16", turned, 3).items():
        assert mine <= BOUNDS["bf16"], name
    assert set(dtypes) == {torch.bfloat16}


@pytest.mark.parametrize("shape", [(96, 32), (32, 96), (5, 3)])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_send_their_runs_and_the_rank_with_the_turn_sends_them_back(world, shape):
    sent = []

    def counting(ranks):
        for messages in zip(*map(lockstep.lockstep, ranks), strict=True):
            sent.append([x.packed(world)[1] for x in messages])  # by sender, by receiver
            lockstep.combine(messages)

    numel = shape[0] * shape[1]
    runs = [len(Shard.of_rank(shape, rank, world)) for rank in range(world)]
    Ranks(Muon(), table.weights([shape]), world).step(table.gradients(1, [shape])[0], counting)
    nothing = [0] * world
    assert sent[0] == [[n] + nothing[1:] for n in runs]
    assert sent[1] == [runs] + [nothing] * (world - 1)
    assert len(sent) == 2 and sum(runs) == numel


@pytest.mark.parametrize("hypers", [{}, {"nbits": 8}])
@pytest.mark.parametrize("world", params(WORLDS, WORLDS[:3]))
def test_ranks_compute_the_bits_of_one_process(world, hypers):
    before, steps = table.weights(SHAPES, torch.float32), table.gradients(3, SHAPES, torch.float32)
    one, many = (ranks_after(Muon(**hypers), before, steps, n) for n in (1, world))
    assert all(map(torch.equal, one.params, many.params))


def iterated(x, coefficients, safety=1.0):
    """The usual iteration on the whole matrix: [rows, cols] -> the same."""
    x = x / (x.norm() * safety + 1e-7)
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if turned else x


JORDAN = [(3.4445, -4.7750, 2.0315)]
# arXiv 2505.16932, algorithm 1.
EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
]
SAFE = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in EXPRESS] + [(1.875, -1.25, 0.375)]


def normuon(g, s, mu, beta2, iterate):
    """The update of NorMuon's authors (their normuon_update), whose momentum is s["m"]."""
    m = s["m"] = mu * s.get("m", 0) + (1 - mu) * g
    u = iterate(mu * m + (1 - mu) * g)
    before = u.norm()
    v = s["v"] = beta2 * s.get("v", 0) + (1 - beta2) * u.square().mean(1, keepdim=True)
    u = u / (v.sqrt() + 1e-10)
    return u * before / (u.norm() + 1e-10) * max(1, g.shape[0] / g.shape[1]) ** 0.5


def muon8(g, s, mu, beta2, iterate):
    """Muon whose momentum is rounded to 8 bits after the step."""
    m = mu * s.get("m", 0) + (1 - mu) * g
    s["m"] = rounded(m, True)
    u = iterate(mu * m + (1 - mu) * g)
    return u * max(1, g.shape[0] / g.shape[1]) ** 0.5


VARIANTS = {
    "NorMuon": (normuon, {"beta2": 0.9}, lambda x: iterated(x, JORDAN * 5)),
    "Polar Express of 10 steps": (
        normuon,
        {"beta2": 0.9, "ns_coefficients": "polar_express", "ns_steps": 10},
        lambda x: iterated(x, SAFE + [SAFE[-1]] * 2, 1.01),
    ),
    "Polar Express of 5 steps": (
        normuon,
        {"beta2": 0.9, "ns_coefficients": "polar_express"},
        lambda x: iterated(x, SAFE[:5], 1.01),
    ),
    "a list": (
        normuon,
        {"beta2": 0.5, "ns_coefficients": (*JORDAN, (1.5, -0.5, 0.0)), "ns_steps": 4},
        lambda x: iterated(x, JORDAN + [(1.5, -0.5, 0.0)] * 3),
    ),
    "8 bits": (muon8, {"nbits": 8}, lambda x: iterated(x, JORDAN * 5)),
}


@pytest.mark.parametrize("world", params([1, 2, 3], [3]))
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_its_authors_formula(variant, world):
    update, hypers, iterate = VARIANTS[variant]
    shapes = ((29, 13), (13, 29), (16, 16), (96, 4), (33, 64))
    rule, steps = Muon(lr=0.02, weight_decay=0.0, **hypers), table.gradients(STEPS, shapes)
    ranks = ranks_after(rule, table.weights(shapes), steps, world)
    expected, states = table.weights(shapes), [{} for _ in shapes]
    for grads in steps:
        for p, g, s in zip(expected, grads, states, strict=True):
            p -= 0.02 * update(g, s, 0.95, hypers.get("beta2"), iterate)
    assert max(errors(ranks.params, expected, table.weights(shapes))) <= 1e-6


def test_bytes_of_the_state_with_8_bits_and_rows():
    parts = dict(leaves(Muon(nbits=8, beta2=0.9).state_spec(Shard.whole((64, 96)))))
    sizes = {
        key: part.total * (part.dtype or torch.float32).itemsize for key, part in parts.items()
    }
    assert sizes == {("m", "code"): 6144, ("m", "scale"): 384, ("v",): 256}


@functools.cache
def llama():
    """The shapes of the matrices of Llama-3.1-8B's layers, by their number in the model."""
    shapes = memory.shapes_of(models.skeleton(models.config("llama-3.1-8b")))
    numbered = enumerate(shapes.items())
    return {i: shape for i, (name, shape) in numbered if "layers" in name and len(shape) == 2}


def begun(shapes, rank, world, turn, stacks=(), **group):
    """The optimizer and the updates of one bucket on one rank; ``turn`` by position."""
    with torch.device("meta"):
        params = [torch.empty(0) for _ in shapes]
        optimizer = OPTIMIZERS["muon"]([{"params": params, **group}])
        optimizer.stacks = {params[i]: 0 for i in stacks}
        shards = [
            dataclasses.replace(Shard.of_rank(shape, rank, world), turn=turn(i))
            for i, shape in enumerate(shapes)
        ]
        runs = [(torch.empty(len(shard)), torch.empty(len(shard))) for shard in shards]
    updates = zip(params, runs, shards, strict=True)
    return optimizer, [RunUpdate(p, *both, shard) for p, both, shard in updates]


def cost(shape):
    """The multiplications of Muon's iteration on a matrix."""
    return muon.Muon().operations(Shard.whole(tuple(shape)))


def imbalance(costs):
    """The largest cost of a rank relative to the mean."""
    return max(costs) * len(costs) / sum(costs)


# By layers in a bucket and ranks: with parameter i on rank i, and by cost.
UNEVEN = {
    (1, 3): (1.36, 1.08),
    (3, 3): (1.36, 1.00),
    (3, 8): (2.14, 1.43),  # 9 large matrices
    (4, 8): (1.79, 1.07),
    (3, 2): (1.09, 1.02),
    (4, 64): (4.29, 4.29),  # 12 large matrices
}


@pytest.mark.parametrize("is_numbered", [True, False])
@pytest.mark.parametrize("layers, world", UNEVEN)
def test_ranks_share_a_bucket_of_llama_by_cost(layers, world, is_numbered):
    """Whether a layout has numbered the parameters or not, as in a plain step with DTensors."""
    numbers = [*llama()][35 : 35 + 7 * layers]  # from layer 5 on
    shapes, by_number, by_cost = [llama()[i] for i in numbers], [0] * world, []
    for i, shape in zip(numbers, shapes, strict=True):
        by_number[i % world] += cost(shape)
    for rank in range(world):
        turn = numbers.__getitem__ if is_numbered else (lambda i: 0)
        optimizer, updates = begun(shapes, rank, world, turn)
        shards = optimizer.begin(updates).plan.turned
        by_cost.append(sum(cost(s.shape) for s in shards if s.has_turn))
    assert sum(by_cost) == sum(by_number)  # one rank has each turn
    found = imbalance(by_number), imbalance(by_cost)
    assert found == pytest.approx(UNEVEN[layers, world], abs=0.006)


@pytest.mark.parametrize("world, before, now", [(3, 1.36, 1.01), (8, 1.0, 1.02), (64, 1.8, 1.1)])
def test_ranks_share_a_model_whose_buckets_hold_one_matrix(world, before, now):
    names = memory.shapes_of(models.skeleton(models.config("llama-3.1-8b")))
    shards = layout.with_turns({p: Shard.of_rank(s, 0, world) for p, s in names.items()})
    chosen = [shard.turn for shard in shards.values()]
    by_number, by_cost = [0] * world, [0] * world
    for i, shape in llama().items():
        by_number[i % world] += cost(shape)
        by_cost[chosen[i]] += cost(shape)
    found = imbalance(by_number), imbalance(by_cost)
    assert found == pytest.approx((before, now), abs=0.01)


@pytest.mark.parametrize(
    "shapes, world, how, most",  # by a rank: the matrices on which it iterates
    [
        ([(16, 16), (4, 16), (4, 16), (16, 16), (48, 16), (16, 48)], 3, {}, [(48, 16)]),
        ([(16, 8), (16, 8)], 4, {"heads": 2}, [(8, 8)]),
        ([(4, 8, 8), (4, 8, 8)], 8, {"stacks": (0, 1)}, [(8, 8)]),
        ([(8, 8), (8, 8)], 1, {}, [(8, 8), (8, 8)]),  # without sharing
    ],
)
def test_one_rank_iterates_on_each_matrix_section_and_expert(shapes, world, how, most, monkeypatch):
    found, iterate, costs = [], newton_schulz.orthogonalized, []

    def noting(x, *how):
        found.extend([x.shape[1:]] * len(x))
        return iterate(x, *how)

    monkeypatch.setattr(newton_schulz, "orthogonalized", noting)
    for rank in range(world):
        found.clear()
        optimizer, updates = begun(shapes, rank, world, lambda i: 2 * i, **how)
        optimizer.update(updates, Alone(rank, world) if world > 1 else None)
        costs.append(sum(map(cost, found)))
    assert max(costs) == sum(map(cost, most))
