"""What DeepSpeed offers beside ZeRO is exact: hpZ's second copies of weights, compiled models."""

import pytest
import transformers

from tests import worlds
from tests.common import engines
from tests.common.by_role import MATRICES
from tests.common.choose import params
from tests.common.hypers import CLOSE
from tests.common.updates import error
from tests.distributed import beside_zero_jobs, training_jobs
from tests.distributed.beside_zero_jobs import COMPILED

# Ranks of each rule.
HPZ = {"adalomo": 4, "came": 2} | dict.fromkeys(MATRICES, 2)


QUICK = [(case,) for case in COMPILED if case[0] is None]  # at stage 3 it takes 12 s


@pytest.mark.supports("ZeRO++ hpZ", stage=3, optimizer="rule")
@pytest.mark.parametrize("rule", params(HPZ, ["adalomo"]))
def test_second_copies_of_the_weights_never_go_stale(rule):
    world, run = HPZ[rule], training_jobs.Training(rule, 3)
    found = worlds.once(world, beside_zero_jobs.second_copies, run)
    told, model = found[0]["told"], beside_zero_jobs.partly_frozen()
    before, expected, _ = training_jobs.alone(run, world, told, model)
    for rank in found:
        assert error(rank["after"], expected, before) <= CLOSE.get(rule, 1e-5)
        for held, parts, left, frozen in rank["copies"]:
            assert held > 10 and parts == {world // 2}  # made in forward, of these runs each
            assert frozen and not left  # kept of what is not trained, forgotten of what was


@pytest.mark.parametrize("frozen", [0, 2])
def test_second_copies_of_persistent_parameters_never_go_stale(frozen):
    for losses in worlds.once(4, beside_zero_jobs.persistent_copies, frozen):
        assert losses[2][1] < losses[0][1] - 0.01
        assert all(ours == pytest.approx(expected, rel=1e-5) for ours, expected in losses)


@pytest.mark.supports("`torch.compile`", stage=lambda case: case[0], optimizer="AdaLomo")
@pytest.mark.parametrize("case", params([(case,) for case in COMPILED], QUICK), ids=str)
def test_a_compiled_model_is_trained_exactly(case):
    model, max_norm = beside_zero_jobs.net(), case[3]
    optimizer = transformers.Adafactor(model.parameters(), lr=0.01, relative_step=False)
    loss_of, steps = beside_zero_jobs.loss_of, beside_zero_jobs.STEPS
    alone = engines.alone(model, optimizer, loss_of, steps, max_norm=max_norm)
    assert min(alone.norms) > 1.5 * max_norm  # or it would show nothing
    for got in worlds.once(2, beside_zero_jobs.compiled, *case):
        assert got["graphs"] > 0
        assert error(got["after"], alone.after, alone.before) <= 1e-5
