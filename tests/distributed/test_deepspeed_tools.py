"""DeepSpeed's tools read our checkpoints; weights of its AdamW and of compiled models load."""

import pytest
import torch

from tests import worlds
from tests.common.choose import params
from tests.distributed import deepspeed_tools_jobs
from tests.distributed.resume_jobs import STAGES, same

TOOLS = [(way, stage) for way in ("fp32", "master") for stage in STAGES] + [("master24", 2)]
ADAMW = [(dtype, stage) for dtype in ("fp32", "bf16") for stage in STAGES]


@pytest.mark.supports(
    lambda stage: "`zero_to_fp32.py`" if stage else [], stage="stage", optimizer="CAME"
)
@pytest.mark.parametrize("way, stage", params(TOOLS, [("master", 3)]))
def test_tools_of_deepspeed_read_our_checkpoints(way, stage):
    got = worlds.once(2, deepspeed_tools_jobs.tools, way, stage)[0]
    weights = got["weights"]
    assert all(got["plain"])  # torch.load(weights_only=True)
    assert same(got["16bit"], weights)
    assert same(got["module only"], weights)
    loaded, states, steps = got["no state"]
    assert same(loaded, weights) and (states, steps) == (0, 3)
    if stage:
        found = got["zero_to_fp32"]
        assert found.keys() == weights.keys()
        assert all(found[n].shape == w.shape for n, w in weights.items())
        assert same({n: t.to(weights[n].dtype) for n, t in found.items()}, weights)
        finer = any(not torch.equal(t, t.bfloat16().float()) for t in found.values())
        assert finer  # masters in fp32


@pytest.mark.parametrize("dtype, stage", params(ADAMW, [("bf16", 1)]))
def test_weights_of_a_model_trained_by_deepspeeds_adamw(tmp_path, dtype, stage):
    trained, _ = worlds.run(2, deepspeed_tools_jobs.adamw, str(tmp_path), stage, dtype)
    (got,) = worlds.run(1, deepspeed_tools_jobs.from_adamw, str(tmp_path), stage, dtype)
    assert same(trained, got["weights"])
    assert got["states"] == 0
    told = f"{got['path']}: only weights are loaded, the state of CAME starts from zero"
    assert any(told in line for line in got["said"])


WAYS = [("plain", "model"), ("model", "submodules"), ("submodules", "both"), ("both", "engine")]
COMPILED = [(ways, stage) for ways in WAYS for stage in (0, 2)] + [(("plain", "engine"), 3)]


@pytest.mark.parametrize("ways, stage", params(COMPILED, []))
def test_compiled_in_one_way_and_loaded_in_another(tmp_path, ways, stage):
    job = deepspeed_tools_jobs.carried_over
    assert worlds.run(2, job, ways, stage, str(tmp_path)) == [(True, True)] * 2


@pytest.mark.parametrize("stage", [0, 1])
def test_weights_of_a_compiled_model_that_adamw_trained(tmp_path, stage):
    job = deepspeed_tools_jobs.adamw_carried_over
    assert worlds.run(2, job, ("model", "plain"), stage, str(tmp_path)) == [True] * 2
