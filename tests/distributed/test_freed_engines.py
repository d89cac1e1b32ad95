"""Engines that nobody holds are freed, with their models, optimizers and states."""

import pytest

from tests import worlds
from tests.distributed import freed_engines_jobs

# At stage 3, DeepSpeed's nodes in a graph that a module keeps hold the module.
CASES = [("dense", 3), *((kind, stage) for kind in ("keeps", "experts") for stage in range(3))]
CASES += [("int8", 1), ("int8", 3)]


@pytest.mark.parametrize("max_norm", [0.0, 0.1])
@pytest.mark.parametrize("how", ["nothing", "step", "steps", "destroyed", "failure"])
@pytest.mark.parametrize("kind, stage", CASES)
def test_a_deleted_engine_is_freed(kind, stage, how, max_norm):
    assert worlds.run(2, freed_engines_jobs.left, kind, stage, how, max_norm) == [[], []]


def test_a_parameter_that_outlives_its_engine_says_so():
    for said in worlds.run(2, freed_engines_jobs.outlived):
        assert "no longer exists" in said
