"""DeepSpeed's safe_get_* and safe_set_* under our optimizers: right at every stage, or refused."""

import pytest
import torch

from tests import worlds
from tests.common.plain import mean_step
from tests.distributed import safe_access_jobs as jobs

STAGES = (0, 1, 2, 3)


WAYS = [(stage, mode) for stage in STAGES for mode in ("fp32", "master")] + [(3, "master24")]


@pytest.mark.parametrize("stage, mode", WAYS)
def test_weights_are_read_and_set_whole(stage, mode):
    dtype = torch.float32 if mode == "fp32" else torch.bfloat16
    for got in worlds.run(2, jobs.weights, stage, mode, dtype):
        assert got["got"].pop("frozen") is None and got["after"].pop("frozen") is None
        assert got["frozen"] == [None] * 3
        assert stage != 3 or "does not support get_local_fp32_param" in got["local"]
        for name, value in got["got"].items():
            assert value.dtype == torch.float32 and value.shape == got["held"][name].shape
            assert torch.equal(value.to(dtype), got["held"][name]), name
        for name, value in zip(("matrix", "bias"), got["set"], strict=True):
            off = (got["after"][name] - value).abs()  # in fp32, also where it is bf16
            assert (off <= (2**-8 / 254 * value.abs() if mode == "master24" else 0)).all(), name
            assert torch.equal(got["used"][name], value.to(dtype)), name
        assert torch.equal(got["after"]["unused"], got["got"]["unused"])
        assert "matrix has 35 elements" in got["wrong size"]


@pytest.mark.parametrize("stage", STAGES)
def test_kept_gradients_are_read_and_set_whole(stage):
    model = jobs.Pair()
    (sum(jobs.loss_of(model, 0, rank) for rank in range(2)) / 2).backward()
    for got in worlds.run(2, jobs.gradients, stage):
        for name in ("matrix", "bias"):
            g = model.get_parameter(name).grad
            assert (got["got"][name] - g).norm() <= 1e-6 * g.norm(), name
            moved = got["before"][name] - got["after"][name]
            assert (moved - 0.1 * 2 * g).norm() <= 1e-5 * moved.norm(), name
        assert got["got"]["frozen"] is None and got["got"]["unused"] is None
        assert all(torch.equal(got["after"][n], v) for n, v in got["skipped"].items())
        early, used_up = got["messages"]
        assert "between engine.backward(loss) and engine.step()" in early
        assert '"gradient_policy": "sharded"' in used_up and "matrix" in used_up


@pytest.mark.parametrize("kind", jobs.STATES)
@pytest.mark.parametrize("stage", STAGES)
def test_states_are_read_and_set_whole_by_their_known_names(stage, kind):
    first, second = worlds.run(2, jobs.states, stage, kind)
    expected = _states(kind)
    for got in (first, second):
        assert got["frozen"] is None
        assert "no state yet" in got["messages"][0]
        assert "keeps no 'exp_avgs' of matrix; it keeps" in got["messages"][1]
        for key, value in got["got"].items():
            assert value.shape == expected[key].shape, key
            off = (value - expected[key]).norm()
            assert off <= 1e-5 * expected[key].norm(), key
            assert torch.allclose(got["after"][key], value, atol=1e-6), key


def _states(kind: str) -> dict[tuple[str, str], torch.Tensor]:
    """The same states of one process with the mean gradients."""
    model = jobs.Pair()
    more = {"rank": 2} if kind == "galoreadamw" else {}
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = jobs.OPTIMIZERS[kind](params, lr=1e-3, **more)
    for number in range(2):
        mean_step(optimizer, [jobs.loss_of(model, number, rank) for rank in range(2)])
    paths = {"exp_avg": "m", "exp_avg_sq_row": "v.row", "exp_avg_sq_col": "v.col"}
    found = {}
    for name, keys in zip(("matrix", "bias"), jobs.STATES[kind], strict=True):
        param = model.get_parameter(name)
        for key in keys:
            value = optimizer.state[param]
            for inner in paths.get(key, "v" if key == "exp_avg_sq" else key).split("."):
                value = value[inner]
            value = value["full"] if isinstance(value, dict) else value
            found[name, key] = value.view_as(param) if value.numel() == param.numel() else value
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_can_be_saved_and_part_from_their_engine(stage):
    assert worlds.run(2, jobs.parted, stage) == [(True, [])] * 2
