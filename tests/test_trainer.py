"""HF Trainer on two ranks with the shipped configs, against HF Trainer in one process with the
authors' optimizers; accelerate's own loop; and the refusals that a Trainer user meets."""

import os
import subprocess
import sys
from pathlib import Path

import came_pytorch
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests import trainer_jobs
from tests.authors import SGD
from tests.trainer_jobs import ARGUMENTS, JOBS, STEPS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
TRAINED = [name for name, job in JOBS.items() if not job.refused]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder with the saved models, results of trainer_worker.py by job)."""
    folder = tmp_path_factory.mktemp("trainer")
    trainer_jobs.model().save_pretrained(folder / "model")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "-m", "tests.trainer_worker", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder, torch.load(folder / "results.pt", weights_only=False), done.stderr


def reference(job, folder):
    """The same training by HF Trainer in one process -> (weights, log)."""
    model = trainer_jobs.model()
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": ARGUMENTS["weight_decay"]},
        {"params": others, "weight_decay": 0.0},
    ]
    lr = (ARGUMENTS | job.arguments)["learning_rate"]
    if job.config == "came":
        optimizer = came_pytorch.CAME(groups, lr=lr)
    elif job.config == "lomo":
        optimizer = SGD(groups, lr)
    else:
        optimizer = transformers.Adafactor(groups, lr=lr, relative_step=False)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, **ARGUMENTS | job.arguments
    )
    trainer = trainer_jobs.Sequential(
        model=model,
        args=arguments,
        train_dataset=trainer_jobs.data(),
        optimizers=(optimizer, None),
    )
    trainer.train()
    return dict(model.named_parameters()), trainer.state.log_history


@pytest.mark.parametrize("name", [n for n in TRAINED if n != "scheduler"])
def test_trainer_equals_one_process(run, name, tmp_path):
    folder, results, _ = run
    assert "error" not in results[name], results[name]["error"]
    before = dict(trainer_jobs.model().named_parameters())
    after, log = reference(JOBS[name], tmp_path)
    saved = load_file(folder / name / "model.safetensors")
    for n, p in after.items():
        update = (p - before[n]).norm()
        resolution = STEPS * 2**-24 * p.norm()
        assert (saved[n] - p).norm() <= max(2e-5 * update, resolution), n
    assert results[name]["kept"] == 0
    assert of(results[name]["log"], "loss") == pytest.approx(of(log, "loss"), rel=1e-3)
    # under DeepSpeed the Trainer logs the rate of the step to come
    rates = of(results[name]["log"], "learning_rate")
    assert rates[:-1] == pytest.approx(of(log, "learning_rate")[1:])


def of(log, key):
    return [entry[key] for entry in log if key in entry]


def test_the_gradient_norm_is_logged(run):
    _, results, _ = run
    norms = of(results["adalomo"]["log"], "grad_norm")
    assert len(norms) == STEPS and all(norm > 0.01 for norm in norms)
    model = trainer_jobs.model()
    batch = trainer_jobs.data()[:4]
    tokens = torch.stack([row["input_ids"] for row in batch])
    model(input_ids=tokens, labels=tokens).loss.backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert norms[0] == pytest.approx(float(expected), rel=1e-4)


def test_norms_are_not_decayed_and_the_log_says_so(run):
    _, results, stderr = run
    for name, decay in results["adalomo"]["decays"].items():
        assert decay == (0.0 if "norm" in name else 0.1), name
    assert "model.layers.*.self_attn.q_proj.weight (2)" in stderr
    assert "no weight decay on: model.layers.*.input_layernorm.weight (2)" in stderr


def test_a_scheduler_of_the_config_is_followed(run):
    _, results, _ = run
    assert "error" not in results["scheduler"], results["scheduler"]["error"]
    rates = of(results["scheduler"]["log"], "learning_rate")
    assert max(rates) == pytest.approx(1e-2) and rates[-1] < 3e-3 and rates[0] < 1e-2


def test_refusals_tell_a_trainer_user_what_to_set(run):
    _, results, _ = run
    assert "max_grad_norm=0.0 in TrainingArguments" in results["clipping"]
    assert "gradient_accumulation_steps=1 in TrainingArguments" in results["accumulation"]


def test_accelerate_loop_learns(run):
    _, results, _ = run
    got = results["accelerate"]
    assert "error" not in got, got["error"]
    assert len(got["losses"]) == 20 and got["norm"] > 0
    assert got["losses"][-1] < got["losses"][0] - 0.5
