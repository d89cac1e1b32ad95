"""Random shapes, ranks, buckets, groups and configs: what is sharded equals what is whole.

Ranks are simulated, with checkpoints between numbers of ranks. The whole counts are more than
10,000 cases. What hypothesis has found is tried again each time.
"""

import copy
import json
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_ext.checkpoint import manifests
from ds_ext.config import config_checks, parsing
from ds_ext.errors import CheckpointError, raise_all
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rules import REGISTRY
from ds_ext.settings import SETTINGS as ALL_SETTINGS
from tests.common import optimizer_ranks
from tests.common.hypers import FOR_ALL
from tests.unit.test_saving_over import manifest

EXACT = 1e-9
# A rule that has no row is run with its defaults.
ROWS = {
    "adalomo": [{}, {"clip_threshold": 0.3}, {"eps": (0.1, 0.9)}],
    "adafactor": [
        {},
        {"beta1": 0.9},
        {"lr": 0.1, "relative_step": False},
        {"beta1": 0.9, "nbits": 8},
    ],
    "came": [{}, {"betas": (0.8, 0.99, 0.995), "eps": (0.1, 0.05)}, {"nbits": 8}],
    "lamb": [{}, {"bias_correction": False}, {"min_coeff": 0.01, "max_coeff": 10.0}],
    "adamw": [{}, {"nbits": 8, "min_8bit_size": 0}],
    "scale": [{}, {"momentum": 0.9}, {"norm_axis": "column"}],
    "sinkgd": [{}, {"iterations": 2}],
    "lion": [{}, {"nbits": 8}],
    "apollo": [{"rank": 2, "update_proj_gap": 2}, {"rank": 3, "scale_type": "tensor"}],
    "apollomini": [{"update_proj_gap": 2}],
    "muon": [{}, {"nesterov": False, "ns_steps": 2}, {"nbits": 8, "beta2": 0.9}],
    "galoreadamw": [
        {"rank": 2, "update_proj_gap": 2},
        {"rank": 3, "proj_type": "right", "update_proj_gap": 1},
        {"rank": 2, "proj_type": "left"},
        {"rank": None},
        {"rank": 2, "nbits": 8, "min_8bit_size": 0, "proj_type": "reverse_std"},
        {"rank": None, "nbits": 8, "min_8bit_size": 0},
    ],
}
SETTINGS = {rule: ROWS.get(rule, [{}]) for rule in REGISTRY}

sizes = st.integers(0, 9) | st.sampled_from([1, 2, 13, 29])
shapes = st.lists(sizes, max_size=4).map(tuple).filter(lambda s: math.prod(s) < 2000) | (
    st.sampled_from([(255,), (256,), (257,), (700,), (33, 40), (1, 513), (300, 2), (0,), (3, 0, 2)])
)
matrices = st.tuples(st.integers(1, 29), st.integers(1, 29)) | st.sampled_from([(1, 513), (300, 2)])
worlds = st.sampled_from([1, 2, 2, 3, 3, 4, 5, 6, 7, 13])


@st.composite
def runs(draw, kind):
    """A run: parameters in groups, cut into buckets, on one number of ranks after another."""
    found = draw(st.lists(shapes if kind in FOR_ALL else matrices, min_size=1, max_size=3))
    n = len(found)
    return {
        "shapes": found,
        "hypers": draw(st.lists(st.sampled_from(SETTINGS[kind]), min_size=2, max_size=2)),
        "decays": draw(st.lists(st.sampled_from([0.0, 0.1]), min_size=2, max_size=2)),
        "group": draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)),
        "bucket": draw(st.integers(1, n)),
        "worlds": draw(st.lists(worlds, min_size=1, max_size=3)),
        "scale": draw(st.sampled_from([1e-6, 1e-2, 1.0, 1e3])),
        "zeros": draw(st.booleans()),
        "dtype": torch.float64,
        "way": "stochastic",
        "seed": draw(st.integers(0, 2**16)),
    }


def made(kind, run, values, world):
    """All ranks of a run in this process, each with an optimizer and memory of its own."""

    def make(params):
        groups = [
            {"params": [p for p, g in zip(params, run["group"], strict=True) if g == i]}
            | run["hypers"][i]
            | {"weight_decay": run["decays"][i], "weight_update": run["way"]}
            for i in range(2)
        ]
        return OPTIMIZERS[kind]([group for group in groups if group["params"]])

    return optimizer_ranks.made(make, values, world)


def step(run, ranks, grads):
    for first in range(0, len(grads), run["bucket"]):
        bucket = slice(first, first + run["bucket"])
        optimizer_ranks.step(ranks, grads, bucket=bucket)


def weights(ranks):
    """The whole weights, flat, with their masters."""
    return [torch.cat(parts) for parts in zip(*(rank.weights for rank in ranks), strict=True)]


def gradients(run, generator, number):
    """Full-rank gradients of very different sizes, of which some are zero."""
    made = []
    for i, shape in enumerate(run["shapes"]):
        g = torch.randn(shape, generator=generator, dtype=torch.float64) * run["scale"] ** (i % 2)
        if len(shape) > 1:
            g = g * torch.randn((*shape[:-1], 1), generator=generator, dtype=torch.float64).exp()
        made.append((g * (0 if run["zeros"] and (i + number) % 2 else 1)).to(run["dtype"]))
    return made


def start(run):
    generator = torch.Generator().manual_seed(run["seed"])
    values = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(run["dtype"])
        for shape in run["shapes"]
    ]
    return values, generator


def fresh(run):
    """Other weights, which loading is to replace."""
    return [torch.full(shape, 7.0, dtype=run["dtype"]) for shape in run["shapes"]]


def compare(kind, run):
    """The error of a run that moves from ranks to ranks, over the update, by parameter."""
    before, generator = start(run)
    steps = [gradients(run, generator, i) for i in range(1 + len(run["worlds"]))]
    whole = made(kind, run, before, 1)
    for grads in steps:
        step(run, whole, grads)
    ranks = None
    for i, world in enumerate(run["worlds"]):
        moved = made(kind, run, before if ranks is None else fresh(run), world)
        if ranks is not None:
            optimizer_ranks.load(moved, ranks)
        ranks = moved
        for grads in steps[i + 1 if i else 0 : i + 2]:  # two on the first, then one
            step(run, ranks, grads)
    worst = 0.0
    for got, exact, old in zip(weights(ranks), weights(whole), before, strict=True):
        off, update = (got - exact).norm(), (exact - old.flatten()).norm()
        assert exact.isfinite().all()
        if off > 1e-15 * exact.norm():
            worst = max(worst, float(off / update))
    return worst


def simple(kind, shape, worlds):
    """A plain run of one parameter, for what was found."""
    run = {"shapes": [shape], "hypers": [SETTINGS[kind][0]] * 2, "decays": [0.1, 0.0], "group": [0]}
    run |= {"bucket": 1, "worlds": worlds, "scale": 1.0, "zeros": False, "seed": 0}
    return run | {"dtype": torch.float64, "way": "stochastic"}


# Shares of the examples in `make test` and in `make test-all`.
SHARES = [(150, []), (16, [pytest.mark.slow])]


def tried(count):
    """Parametrizes a test by numbers of examples."""
    return pytest.mark.parametrize(
        "count", [pytest.param(count // share, marks=marks) for share, marks in SHARES]
    )


def attempt(count, strategy, check, *found):
    """Runs ``check`` on ``count`` examples, and on those that were ``found`` to fail once."""
    for each in found:
        check = example(each)(check)
    settings(max_examples=count)(given(strategy)(check))()


# Examples of each rule, and runs that once failed: a rank without elements of a vector, whose empty
# state came back in fp32; and a matrix without elements, divided by its columns.
COUNTS = {"lomo": 1000, "adalomo": 1500, "adafactor": 1500, "came": 1200, "lamb": 1200}
COUNTS |= {"adamw": 300, "flashadamw": 300, "lion": 300, "scale": 600, "sinkgd": 600}
COUNTS |= {"apollo": 300, "apollomini": 300, "muon": 300, "galoreadamw": 1200}
FAILED = {
    "adalomo": simple("adalomo", (1,), [1, 2]),
    "galoreadamw": simple("galoreadamw", (3, 0), [1]),
}


@pytest.mark.parametrize(
    "kind, count",
    [
        pytest.param(kind, count // share, marks=marks)
        for kind, count in COUNTS.items()
        for share, marks in SHARES
    ],
)
def test_sharded_equals_whole(kind, count):
    def check(run):
        assert compare(kind, run) <= EXACT

    attempt(count, runs(kind), check, *([FAILED[kind]] if kind in FAILED else []))


@st.composite
def runs_of_16_bits(draw):
    kind = draw(st.sampled_from(list(SETTINGS)))
    return kind, draw(runs(kind)) | {
        "dtype": draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        "way": draw(st.sampled_from(["stochastic", "nearest", "master", "master24"])),
    }


@tried(900)
def test_16_bit_weights_move_to_other_ranks_bit_for_bit(count):
    attempt(count, runs_of_16_bits(), moves)


def moves(found):
    kind, run = found
    before, generator = start(run)
    ranks = made(kind, run, before, run["worlds"][0])
    for i in range(2):
        step(run, ranks, gradients(run, generator, i))
    for world in (*run["worlds"][1:], run["worlds"][0]):
        moved = made(kind, run, fresh(run), world)
        optimizer_ranks.load(moved, ranks)
        assert all(map(torch.equal, weights(moved), weights(ranks)))
        ranks = moved


KEYS = [key for key, setting in ALL_SETTINGS.items() if setting.advice] + [
    *("gradient_clipping", "gradient_accumulation_steps", "managed_gradient_accumulation"),
    *("ds_ext.gradient_policy", "ds_ext.clip_mode", "ds_ext.clip_value", "ds_ext.measure_updates"),
    *("data_types.grad_accum_dtype", "zero_optimization.reduce_bucket_size", "ds_ext", "ds_ext.x"),
]
values = st.sampled_from(
    [None, True, False, 0, 1, 2, -1, 0.5, "none", "cpu", "fused", "sharded", "exact", "previous"]
    + ["auto", "bf16", "fp32", [], {}, {"device": "cpu"}, math.nan, math.inf, 10**9, ""]
).map(copy.deepcopy)  # one object in two places could contain itself


@tried(1500)
def test_a_config_is_honoured_or_refused_with_a_message(count):
    found = ({"zero_optimization.reduce_bucket_size": "none"},)
    found += ({"zero_optimization.reduce_bucket_size": -1}, {"data_types.grad_accum_dtype": []})
    found += ({"ds_ext": True},)
    keys = st.dictionaries(st.sampled_from(KEYS), values, max_size=4)
    attempt(count, keys, honoured_or_refused, *found)


def honoured_or_refused(given_):
    config = {}
    for key, value in given_.items():
        *above, last = key.split(".")
        inner = config
        for part in above:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                return
        inner[last] = value
    try:
        raise_all(config_checks.read(config).problems)
        how = parsing.gradients(parsing.normalized(config))
    except ValueError as error:
        assert any(part in str(error) for key in given_ for part in key.split("."))
        return
    assert (how.bucket_size or 0) >= 0 and how.policy in ("fused", "sharded")


def test_a_damaged_manifest_is_refused_or_unharmed(tmp_path):
    """With one bit of each byte flipped, and cut before each byte."""
    said = manifest("t", 3, {})
    content = json.dumps(said | {"crc32": manifests._checksum(said)}, indent=1).encode()
    refused = 0
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1
        for damaged in (changed, content[:at]):
            (tmp_path / manifests.MANIFEST).write_bytes(damaged)
            try:
                assert manifests.read(tmp_path) == said
            except CheckpointError as error:
                assert manifests.MANIFEST in str(error)
                refused += 1
    assert refused > 1.5 * len(content)
