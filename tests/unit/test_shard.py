"""The geometry of runs: the cut is ZeRO's, and blocks tile a run whatever its shape and limit."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ext.ops.shard import BLOCK, Block, Box, Shard, TensorParallelSplit

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


@given(shapes)
def test_mats_rows_and_cols_are_those_of_the_shape(shape):
    shard = Shard.whole(shape)
    assert shard.mats * shard.rows * shard.cols == math.prod(shape)
    if len(shape) < 2:
        assert not shard.is_matrix and (shard.mats, shard.rows) == (1, 1)
    else:
        assert shard.is_matrix and (shard.rows, shard.cols) == shape[-2:]


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


@given(shards(), st.floats(0, 1e6))
def test_rms_is_over_the_whole_parameter(shard, square_sum):
    expected = math.sqrt(square_sum / math.prod(shard.shape))
    assert shard.rms(square_sum) == pytest.approx(expected)


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
