"""HF Trainer and accelerate with FSDP2 on two ranks, against one process and the authors' code."""

import pytest
import torch

from tests import worlds
from tests.common.choose import params
from tests.integration import fsdp2_trainer_jobs, trainer_runs
from tests.integration.fsdp2_trainer_jobs import RUNS
from tests.integration.own_loops import LOOPS
from tests.integration.test_trainer import build, check_loop, compare, of, reference, weights
from tests.integration.trainer_runs import STEPS

pytest.importorskip("transformers.distributed", reason="transformers 5 cuts models by FSDP2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with models, by the size of their vocabulary."""
    made = tmp_path_factory.mktemp("fsdp2")
    for vocab in (fsdp2_trainer_jobs.ODD, fsdp2_trainer_jobs.EVEN):
        trainer_runs.model(vocab).save_pretrained(made / str(vocab))
    return str(made)


@pytest.mark.supports("HF Trainer", stage="fsdp2", optimizer=lambda name: RUNS[name].rule)
@pytest.mark.parametrize("name", params(RUNS, ["came-both"]))
def test_trainer_equals_one_process(folder, name):
    got, run = worlds.run(2, fsdp2_trainer_jobs.train, folder, name)[0], RUNS[name]
    after, log = reference(run.rule, run.max_norm, False, vocab=run.vocab)
    compare(got["after"], after, weights(build(vocab=run.vocab)), STEPS)
    assert of(got["log"], "loss") == pytest.approx(of(log, "loss"), rel=1e-3)
    assert of(got["log"], "grad_norm") == pytest.approx(of(log, "grad_norm"), rel=1e-4)
    if run.max_norm:
        assert min(of(log, "grad_norm")) > 1.05 * run.max_norm
    assert of(got["log"], "learning_rate") == pytest.approx(of(log, "learning_rate"))


@pytest.mark.supports("HF Trainer's resume", stage="fsdp2", optimizer="rule")
@pytest.mark.parametrize(
    "rule, kind",
    params(
        [
            ("adalomo", "SHARDED_STATE_DICT"),
            ("flashadamw", "SHARDED_STATE_DICT"),
            ("came", "FULL_STATE_DICT"),
        ],
        [("adalomo", "SHARDED_STATE_DICT")],
    ),
)
def test_a_run_that_is_resumed_goes_on_bit_for_bit(folder, rule, kind):
    for got in worlds.run(2, fsdp2_trainer_jobs.resume, folder, rule, kind):
        for n, p in got["unbroken"].items():
            assert torch.equal(p, got["resumed"][n]) and not torch.equal(p, got["before"][n]), n


def test_what_trainer_cannot_do_is_refused_before_a_weight_moves(folder):
    for told in worlds.run(2, fsdp2_trainer_jobs.refused, folder):
        assert "lm_head.weight" in told["tied"] and "tie_word_embeddings" in told["tied"]
        assert "max_grad_norm = 1 would need a second" in told["clipping"]
        assert "several ranks train a model that FSDP2 has not cut" in told["whole"]
        assert "AdamW" in told["other"] and "Only optimizers of ds_ext" in told["other"]


@pytest.mark.supports(
    "accelerate, your own loop", stage="fsdp2", optimizer=lambda name: LOOPS[name].config
)
@pytest.mark.parametrize("name", params(LOOPS, ["lomo-both"]))
def test_accelerates_loop_equals_one_process(folder, name):
    check_loop(worlds.run(2, fsdp2_trainer_jobs.accelerate, folder, name)[0], LOOPS[name])
