"""The geometry of runs: the cut is ZeRO's, and blocks tile a run whatever its shape and limit.

Tensor parallelism simulated: boxes of a matrix on each rank, and the whole matrix's step.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_ext.ops import sixteen_bit
from ds_ext.ops.shard import BLOCK, Block, Box, Shard, TensorParallelSplit
from ds_ext.optimizer import OPTIMIZERS
from tests.common import needs, optimizer_ranks, paths, table
from tests.common.choose import paired, params
from tests.common.hypers import FOR_ALL, SIMULATED, changed

shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)
worlds = st.integers(1, 40)


@st.composite
def shards(draw):
    """Any run of any parameter, not only those that ZeRO cuts."""
    shape = draw(shapes)
    start = draw(st.integers(0, math.prod(shape)))
    return Shard(shape, start, draw(st.integers(start, math.prod(shape))), 1)


def elements(block, shard):
    """The flat indices, in the whole parameter, of a block's box in row-major order."""
    return [
        (mat * shard.rows + row) * shard.cols + col
        for mat, row, col in itertools.product(
            range(*block.mats.indices(shard.mats)),
            range(*block.rows.indices(shard.rows)),
            range(*block.cols.indices(shard.cols)),
        )
    ]


@given(shards(), st.integers(1, 400))
def test_blocks_tile_the_run_in_order(shard, limit):
    at = 0
    for block in shard.blocks(limit):
        assert block.run.start == at
        at = block.run.stop
        expected = list(range(shard.start + block.run.start, shard.start + block.run.stop))
        assert elements(block, shard) == expected
        assert 0 < len(expected) <= limit
        assert block.shape == tuple(s.stop - s.start for s in (block.mats, block.rows, block.cols))
        assert math.prod(block.shape) == len(expected)
    assert at == len(shard)


@given(shards(), st.integers(1, 400))
def test_no_block_could_be_joined_with_the_next(shard, limit):
    for block, following in itertools.pairwise(shard.blocks(limit)):
        joined = Block(
            slice(block.run.start, following.run.stop),
            *(
                slice(min(a.start, b.start), max(a.stop, b.stop))
                for a, b in zip(_box(block), _box(following), strict=True)
            ),
        )
        is_box = elements(joined, shard) == elements(block, shard) + elements(following, shard)
        assert not is_box or math.prod(joined.shape) > limit


def _box(block):
    return block.mats, block.rows, block.cols


def test_a_parameter_below_the_default_limit_is_one_block():
    assert [b.shape for b in Shard.whole((4, 16, 32)).blocks()] == [(4, 16, 32)]
    assert [b.shape for b in Shard.whole((BLOCK,)).blocks()] == [(1, 1, BLOCK)]
    assert [b.shape for b in Shard.whole((BLOCK + 1,)).blocks()] == [(1, 1, BLOCK), (1, 1, 1)]
    assert [b.shape for b in Shard.whole(()).blocks()] == [(1, 1, 1)]


@given(shapes, worlds)
def test_ranks_cover_the_parameter_by_equal_runs(shape, world):
    parts = [Shard.of_rank(shape, rank, world) for rank in range(world)]
    n = math.prod(shape)
    size = math.ceil(n / world)
    flat = list(range(n))
    for rank, part in enumerate(parts):
        own = flat[rank * size : (rank + 1) * size]
        assert (part.stop - part.start, len(part)) == (len(own), len(own))
        assert flat[part.start : part.stop] == own
        assert part.shape == shape and part.numel == n
    assert sum(map(len, parts)) == n


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 3)])
def test_a_parameter_without_elements(shape):
    for rank in range(3):
        shard = Shard.of_rank(shape, rank, 3)
        assert (shard.start, shard.stop, list(shard.blocks())) == (0, 0, [])
        assert (shard.rows, shard.cols) == (1, *shape)[-2:]
        assert shard.mats == math.prod(shape[:-2])


@pytest.mark.parametrize("start, stop", [(-1, 3), (4, 3), (0, 16), (16, 16)])
def test_a_run_outside_the_parameter_is_refused(start, stop):
    with pytest.raises(AssertionError, match="outside"):
        Shard((3, 5), start, stop, 5)


def turns(shards, n):
    """Which of the ranks have each of n turns."""
    taken = [[replace(s, turn=i).has_turn for s in shards] for i in range(n)]
    return [[rank for rank, has in enumerate(ranks) if has] for ranks in taken]


@pytest.mark.parametrize("world", [1, 2, 3, 7, 64])
def test_one_rank_with_elements_has_a_turn(world):
    for shape in ((13, 5), (1, 7), (40,)):
        shards = [Shard.of_rank(shape, rank, world) for rank in range(world)]
        holders = [rank for rank, shard in enumerate(shards) if len(shard)]
        assert turns(shards, 70) == [[holders[i % len(holders)]] for i in range(70)]
    split = TensorParallelSplit(((Box(0, 3, 0, 4),), (Box(3, 2, 0, 4),)), 2)
    shards = [Shard.of_split((5, 4), split, part, rank) for part in (0, 1) for rank in (0, 1)]
    assert turns(shards, 8) == [[0], [1], [2], [3]] * 2
    stack = [Shard((4, 3), 0, 5, 8, cut_at=(0, 5)), Shard((4, 3), 5, 12, 8, cut_at=(0, 5))]
    assert turns(stack, 3) == [[0], [1], [0]]


SHAPE = (12, 20)
DIVIDED = {
    "rows": ((Box(0, 6, 0, 20),), (Box(6, 6, 0, 20),)),
    "rows-uneven": ((Box(0, 8, 0, 20),), (Box(8, 4, 0, 20),)),
    "rows-3": tuple((Box(4 * i, 4, 0, 20),) for i in range(3)),
    "cols": ((Box(0, 12, 0, 10),), (Box(0, 12, 10, 10),)),
    "cols-uneven": ((Box(0, 12, 0, 13),), (Box(0, 12, 13, 7),)),
    "qkv": (
        (Box(0, 3, 0, 20), Box(6, 2, 0, 20), Box(9, 1, 0, 20)),
        (Box(3, 3, 0, 20), Box(8, 1, 0, 20), Box(10, 2, 0, 20)),
    ),
    "nothing-left": ((Box(0, 12, 0, 20),), ()),
}
SETTINGS = changed(SIMULATED, lomo={"lr": 0.5})
LEFT = SETTINGS["galoreadamw"] | {"proj_type": "right"}  # the other side than "std" takes here
STEPS = 4
BOXES = ("rows-uneven", "cols-uneven", "qkv")
TABLES = ("native", "kernels") if needs.TRITON else ("native",)
PASSES = list(itertools.product(["adalomo", "came"], BOXES, TABLES))
QUICK = [case for case in PASSES if case[2] == "native" or case[:2] == ("came", "qkv")]


def shards_of(boxes, world, shape=SHAPE):
    split = TensorParallelSplit(boxes, world)
    parts = range(len(boxes))
    return [Shard.of_split(shape, split, i, r) for i, r in itertools.product(parts, range(world))]


def part_of(whole, shard):
    """The elements of a run, [len(shard)], of a whole matrix."""
    matrix = whole.reshape(1, -1) if whole.dim() < 2 else whole
    boxes = itertools.chain(*shard.split.boxes)
    held = [matrix[b.row : b.row + b.rows, b.col : b.col + b.cols].flatten() for b in boxes]
    return torch.cat(held)[shard.start : shard.stop].clone()


class Rank(optimizer_ranks.Rank):
    """One rank's run of a matrix that is split."""

    def cut(self, tensors):
        return [part_of(x, shard) for x, shard in zip(tensors, self.shards, strict=True)]


def whole_and_split(name, hypers, boxes, world, shape=SHAPE, dtype=torch.float64):
    """The worst error of a split parameter's runs, relative to the update; the states; rounds."""
    (weights,), gradients = table.weights((shape,)), table.gradients(STEPS, (shape,))

    def make(params):
        return OPTIMIZERS[name](params, **hypers)

    (one,) = optimizer_ranks.made(make, [weights], 1)
    optimizer_ranks.step([one], *gradients)
    (expected,), shards = one.runs, shards_of(boxes, world, shape)
    ranks = [Rank(make, [weights.to(dtype)], [shard]) for shard in shards]
    taken = optimizer_ranks.step(ranks, *([g.to(dtype)] for (g,) in gradients))
    states = [rank.optimizer.state[rank.params[0]] for rank in ranks]
    whole = expected.view(shape)
    size = (whole - weights).norm()
    error = sum(
        float((rank.runs[0].double() - part_of(whole, shard)).norm() ** 2)
        for rank, shard in zip(ranks, shards, strict=True)
    )
    return error**0.5 / float(size), states, taken


@pytest.mark.parametrize(
    "name, how, world", paired(OPTIMIZERS, itertools.product(DIVIDED, [3, 2, 1]))
)
def test_a_split_matrix_takes_the_step_of_the_whole(name, how, world):
    error, states, _ = whole_and_split(name, SETTINGS[name], DIVIDED[how], world)
    if name == "flashadamw" and how.startswith(("cols", "qkv")):  # other elements share a scale
        assert 1e-3 < error <= 0.1
    else:
        assert error <= 1e-9
    for state in states[1:]:  # statistics are those of the whole matrix, on every rank
        for v in ("v", "r"):
            if isinstance(state.get(v), dict) and "row" in state[v]:
                assert torch.equal(state[v]["row"], states[0][v]["row"])
                assert torch.equal(state[v]["col"], states[0][v]["col"])


BIAS = ((Box(0, 1, 0, 7),), (Box(0, 1, 7, 4),))
MORE = [("galoreadamw", LEFT, boxes, 2, SHAPE) for boxes in DIVIDED.values()]
MORE += [(name, SETTINGS[name], BIAS, 2, (11,)) for name in FOR_ALL]
# Boxes that hold whole groups of the 8-bit moments of the whole matrix.
GROUPS = ((Box(0, 12, 0, 64),), (Box(0, 12, 64, 32),))
MORE += [
    (name, SETTINGS[name] | hypers, GROUPS, world, (12, 96))
    for name, hypers in (("flashadamw", {}), ("lion", {"nbits": 8}), ("came", {"nbits": 8}))
    for world in (1, 3)
]
# Blocks of 256 moments that go through the cuts of tensor and of data parallelism.
MOMENTS = ((Box(0, 1, 0, 2901),), (Box(0, 1, 2901, 2099),))
MORE += [("galoreadamw", {"lr": 0.02, "rank": None, "nbits": 8}, MOMENTS, 3, (5000,))]


@pytest.mark.parametrize("name, hypers, boxes, world, shape", MORE, ids=str)
def test_other_parameters_and_forms_take_the_step_of_the_whole(name, hypers, boxes, world, shape):
    assert whole_and_split(name, hypers, boxes, world, shape)[0] <= 1e-9


@pytest.mark.parametrize(
    "how, world, expected",
    [("rows", 1, 1), ("rows", 2, 1), ("rows", 4, 2), ("qkv", 1, 1), ("cols", 1, 2)],
)
def test_whole_rows_take_one_round(how, world, expected):
    _, _, taken = whole_and_split("adalomo", SETTINGS["adalomo"], DIVIDED[how], world)
    assert taken == expected


@pytest.mark.parametrize("how", DIVIDED)
def test_runs_tile_the_parameter(how):
    seen = torch.zeros(SHAPE, dtype=torch.int)
    numbers = []
    for shard in shards_of(DIVIDED[how], 3):
        numbers += range(shard.start, shard.stop)
        rows = set()
        for limit in (1, 7, 50, None):
            at = 0
            for b in shard.blocks(limit):
                assert b.run.start == at and b.mats == slice(0, 1)
                at = b.run.stop
                if limit is None:
                    seen[b.rows, b.cols] += 1
                    rows |= set(range(b.rows.start, b.rows.stop))
            assert at == len(shard)
        assert set(rows) <= set(range(*shard.touched.indices(SHAPE[0])))
        if rows:
            assert (shard.touched.start, shard.touched.stop) == (min(rows), max(rows) + 1)
    assert torch.equal(seen, torch.ones_like(seen))
    assert sorted(numbers) == list(range(SHAPE[0] * SHAPE[1]))


def test_noise_differs_from_box_to_box():
    weights = torch.full((4, 2**10), 1.0, dtype=torch.bfloat16)
    boxes = ((Box(0, 2, 0, 2**10),), (Box(2, 2, 0, 2**10),))
    written = []
    for shard in shards_of(boxes, 1, tuple(weights.shape)):
        run = weights.flatten()[: len(shard)].clone()
        w = sixteen_bit.weight(run, {"step": 1}, sixteen_bit.RoundingConfig(), 0, shard)
        for b in shard.blocks():
            w.write_(b, torch.full(b.shape, 1.003))
        written.append(run)
    assert not torch.equal(*written)


@pytest.mark.parametrize("name, how, path", params(PASSES, QUICK))
def test_tables_make_the_passes_of_a_box(name, how, path, monkeypatch):
    """Compares the step of boxes by one executor, which must have run."""
    used = paths.passes(monkeypatch)
    paths.use(monkeypatch, path)
    error, _, _ = whole_and_split(name, SETTINGS[name], DIVIDED[how], 2, dtype=torch.float32)
    assert error <= 1e-5
    assert any("apply" in label for label in used)
