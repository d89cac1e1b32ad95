"""TRL's trainers that generate between steps, on two ranks, against one process with the authors'
optimizers: the same completions are sampled, and the weights become the same."""

import pytest

from tests import worlds
from tests.common import authors
from tests.common.choose import params
from tests.integration import online_jobs, trainer_runs
from tests.integration.online_jobs import JOBS, STEPS
from tests.integration.test_trainer import compare, of, split, weights

pytest.importorskip("trl", reason="TRL, which needs Python 3.11, is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("online")
    trainer_runs.model().save_pretrained(made / "model")
    return str(made)


@pytest.mark.supports(
    "TRL's GRPO, RLOO and online DPO",
    stage=lambda name: JOBS[name].stage,
    optimizer=lambda name: JOBS[name].optimizer,
)
@pytest.mark.parametrize("name", params(JOBS, ["grpo-3"]))
def test_generation_between_steps_equals_one_process(folder, name):
    job = JOBS[name]

    def optimizer_of(model):
        groups = split(model, trainer_runs.ARGUMENTS["weight_decay"])
        return authors.ordinary(job.optimizer, groups, {"lr": job.lr})

    model, log = online_jobs.train_alone(folder, name, optimizer_of)
    after, before = weights(model), weights(online_jobs.model(job, folder))
    rewards = of(log, "reward") or of(log, "objective/scores")
    assert len(set(rewards)) == STEPS and min(of(log, "grad_norm")) > 0
    for got in worlds.run(2, online_jobs.train, folder, name):
        compare(got["after"], after, before, STEPS)
        found = of(got["log"], "reward") or of(got["log"], "objective/scores")
        assert found == pytest.approx(rewards, rel=1e-5)
        assert of(got["log"], "grad_norm") == pytest.approx(of(log, "grad_norm"), rel=1e-4)
        assert not any(got["held"]), "gathered for generation, and not freed"
        steps = job.arguments.get("gradient_accumulation_steps", 1)
        assert got["policy"] == ("fused" if steps == 1 else "sharded")
