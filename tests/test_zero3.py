"""Real ranks under ZeRO-3 against the authors' optimizers in one process, on the same batches.

Each world (1, 2 and 3 processes over gloo) is started once and runs all cases of worker.py.
"""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import came_pytorch
import galore_torch
import lomo_optim
import pytest
import torch
import transformers

from tests import models
from tests.worker import CASES, STEPS, Case

pytestmark = pytest.mark.slow
WORLDS = [1, 2, 3]
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session", params=WORLDS, ids="ranks{}".format)
def run(request, tmp_path_factory):
    """(number of ranks, results of worker.py by case)."""
    out = tmp_path_factory.mktemp("world") / "results.pt"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc_per_node={request.param}", "-m", "tests.worker", str(out)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return request.param, torch.load(out, weights_only=False)


class Reference:
    """One process with the whole model: steps on the mean loss over all ranks' batches."""

    def __init__(self, case: Case, decays: dict[str, float]) -> None:
        self.model = models.make(None, case.tensors)
        self.norms: list[float] = []
        self.backward = self._fused if case.rule == "lomo" else self._plain
        named = dict(self.model.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if decays[n] == decay], "weight_decay": decay}
            for decay in sorted(set(decays.values()))
        ]
        hypers = {k: v for k, v in case.hypers.items() if k != "weight_decay"}
        if case.rule == "lomo" and len(groups) > 1:
            self.optimizer = SGD(groups, **hypers)
            self.backward = self._plain
        elif case.rule == "lomo":
            decay = groups[0]["weight_decay"]
            self.optimizer = lomo_optim.Lomo(self.model, weight_decay=decay, **hypers)
        elif case.rule == "adalomo" and not case.tensors:
            decay = groups[0]["weight_decay"]
            with mock.patch.object(torch.Tensor, "cuda", lambda self: self):
                self.optimizer = lomo_optim.AdaLomo(
                    self.model, loss_scale=None, weight_decay=decay, **hypers
                )
            self.backward = self._fused
        elif case.rule == "lamb":
            self.optimizer = LAMB(groups, **hypers)
        elif case.rule == "galoreadamw":
            self.optimizer = galore(groups, hypers)
        elif case.rule == "came":
            self.optimizer = came_pytorch.CAME(groups, **hypers)
        else:  # AdaLomo is Adafactor with a given lr; its authors' code takes matrices only
            hypers["relative_step"] = False
            self.optimizer = transformers.Adafactor(groups, **hypers)
        self.lr = hypers["lr"]

    def step(self, tokens: torch.Tensor, step: int) -> None:
        self.backward(sum(self.model(t, step=step) for t in tokens) / len(tokens))

    def _plain(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(grads)))
        self.optimizer.step()

    def _fused(self, loss: torch.Tensor) -> None:
        self.optimizer.fused_backward(loss, self.lr)


class SGD(torch.optim.Optimizer):
    """LOMO's formula with decay by group, which its authors' code does not have."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * p.grad)


class LAMB(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 1904.00962, in fp64."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group["lr"], group["weight_decay"])

    def _step(self, p, lr, decay):
        s, g, w = self.state[p], p.grad.double(), p.double()
        s["t"] = s.get("t", 0) + 1
        s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
        s["v"] = 0.999 * s.get("v", 0) + 0.001 * g**2
        m, v = s["m"] / (1 - 0.9 ** s["t"]), s["v"] / (1 - 0.999 ** s["t"])
        u = m / (v.sqrt() + 1e-6) + decay * w
        ratio = w.norm() / u.norm() if w.norm() > 0 and u.norm() > 0 else 1.0
        p.copy_(w - lr * ratio * u)


def galore(groups, hypers):
    """galore_torch's optimizer, low-rank for the matrices and plain AdamW for the rest."""
    keys = {"rank": hypers["rank"], "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    split = []
    for group in groups:
        matrices = [p for p in group["params"] if p.ndim == 2]
        others = [p for p in group["params"] if p.ndim != 2]
        split.append({**group, "params": matrices, **keys})
        split.append({**group, "params": others})
    return galore_torch.GaLoreAdamW([g for g in split if g["params"]], lr=hypers["lr"])


EXACT = [name for name, case in CASES.items() if case.dtype == "fp32" and "groups" not in name]


@pytest.mark.parametrize("name", EXACT)
def test_equals_the_authors(run, name):
    world, results = run
    got, case = results[name], CASES[name]
    assert "error" not in got, got["error"]
    reference = Reference(case, got["decays"])
    before = {n: p.detach().clone() for n, p in reference.model.named_parameters()}
    for step in range(STEPS):
        reference.step(models.batch(step, world), case.step(step))
    after = {n: p.detach() for n, p in reference.model.named_parameters()}
    square, square_error = 0.0, 0.0
    for n in before:
        assert torch.equal(got["before"][n], before[n])
        update = (after[n] - before[n]).norm()
        error = (got["after"][n] - after[n]).norm()
        # fp32 itself cannot tell apart what lies within its rounding of the weight at each step
        resolution = STEPS * 2**-24 * after[n].norm()
        assert error <= max(1e-5 * update, resolution), (n, float(error), float(update))
        square, square_error = square + update**2, square_error + error**2
    assert square_error**0.5 <= 1e-5 * square**0.5
    if reference.norms:
        assert got["norms"] == pytest.approx(reference.norms, rel=1e-4)
    untouched = {"unused.weight", "unused.bias", "frozen.weight", "frozen.bias"}
    untouched |= set() if case.odd else {"odd.weight"}
    moved = {n for n in after if not torch.equal(got["after"][n], before[n])}
    assert moved == set(after) - untouched


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_hold_the_same_bits(run, name):
    assert run[1][name]["identical"]


@pytest.mark.parametrize("name", CASES)
def test_a_parameter_steps_once_a_step(run, name):
    for param, steps in run[1][name]["steps"].items():
        assert steps == (STEPS // 2 if param == "odd.weight" else STEPS), param
    assert len(run[1][name]["steps"]) == sum(map(CASES[name].is_used, run[1][name]["before"]))


@pytest.mark.parametrize("name", CASES)
def test_gradients_alive_are_one_bucket_and_one_parameter(run, name):
    world, results = run
    model = models.make(None, CASES[name].tensors)
    sizes = [-(-p.numel() // world) * world for p in model.parameters()]
    largest = max(sizes)
    assert results[name]["kept"] == 0
    assert 0 < results[name]["alive"] <= max(CASES[name].bucket, largest) + largest


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].checkpointing is None])
def test_gradients_are_reduce_scattered_once_and_only_statistics_all_reduced(run, name):
    world, results = run
    sent = results[name]["sent"]
    if world == 1:
        assert not sent
        return
    model = models.make(None, CASES[name].tensors)
    used = [p for n, p in model.named_parameters() if CASES[name].is_used(n)]
    totals = {kind: sum(n for k, n in sent if k == kind) for kind, _ in sent}
    if not CASES[name].stage:
        gradients = sum(p.numel() for p in used)
        assert totals == {"all_reduce": gradients + len(used)}  # and a vote a parameter
        return
    gradients = sum(-(-p.numel() // world) * world for p in used)
    assert totals["reduce_scatter"] == gradients + world * len(used)
    statistics = 2 * sum(sum(p.shape) + 2 for p in used)
    assert totals.get("all_reduce", 0) <= 2 * statistics


def test_groups_have_their_own_hyper_parameters(run):
    world, results = run
    got = results["adalomo-groups"]
    model = models.make()
    params = list(model.parameters())
    settings = [{"lr": 0.02}, {"lr": 0.01, "weight_decay": 0.2}, {"lr": 0.005}]
    settings[2]["clip_threshold"] = 0.5
    optimizer = transformers.Adafactor(
        [{"params": params[i::3]} | s for i, s in enumerate(settings)], relative_step=False
    )
    before = [p.detach().clone() for p in params]
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(model(t, step=step) for t in models.batch(step, world)) / world).backward()
        optimizer.step()
    for (n, p), b in zip(model.named_parameters(), before, strict=True):
        assert (got["after"][n] - p).norm() <= 2e-5 * (p - b).norm(), n


@pytest.mark.parametrize("stage", range(4))
def test_bf16_follows_fp32(run, stage):
    got = run[1][f"adalomo-bf16-stage{stage}"]
    exact = run[1]["adalomo-authors"]
    for n, p in got["after"].items():
        assert p.dtype == torch.bfloat16
        update = (exact["after"][n] - exact["before"][n]).norm()
        resolution = 2**-9 * exact["after"][n].norm()
        assert (p.float() - exact["after"][n]).norm() <= 0.3 * update + resolution, n


MESSAGES = {
    "unknown": ["optimizer.params.weight_decy", '"weight_decay"'],
    "type": ["optimizer.params.lr", "'fast'", "a number >= 0"],
    "negative": ["optimizer.params.lr", "-1.0", "a number >= 0"],
    "pair": ["optimizer.params.betas", "[0.9, 0.999]", "a list of 3"],
    "clipping": ["gradient_clipping", "max_grad_norm=0.0"],
    "accumulation": ["gradient_accumulation_steps", "set it to 1"],
    "derived accumulation": ["gradient_accumulation_steps"],
    "scheduler": ["relative_step", "scheduler"],
}


@pytest.mark.parametrize("case", MESSAGES)
def test_bad_configs_are_refused_on_every_rank(run, case):
    world, results = run
    messages = results["refusals"][case]
    assert len(messages) == world
    for message in messages:
        assert all(part in message for part in MESSAGES[case]), message


def test_a_gradient_that_is_not_finite_reaches_no_weight_on_any_rank(run):
    world, results = run
    got = results["not finite"]
    assert got["skipped"] == [1] * world
    assert got["changed"] == {"other", "twice"} and got["finite"]
    assert got["state"] == {"bad": 0, "other": 1, "twice": 1}


def test_a_trainable_parameter_outside_the_optimizer_keeps_no_gradient(run):
    assert run[1]["outside"] == {"kept": 0, "changed": {"weight"}}


def test_ranks_with_different_parameters_get_an_error_and_do_not_hang(run):
    world, results = run
    for messages in results["uneven"]:
        assert len(messages) == world
        if world > 1:
            assert all("same parameters" in message for message in messages)
            assert "bad.weight" in messages[0] and "other.weight" in messages[1]


def test_target_modules_choose_what_galore_projects(run):
    got = run[1]["galore json"]
    assert "error" not in got, got["error"]
    assert {n for n, rank in got["ranks"].items() if rank == 3} == {"up.weight", "down.weight"}
    assert {rank for rank in got["ranks"].values()} == {3, None}
    assert "target_modules" in got["message"] and "upp" in got["message"]


def test_a_second_backward_before_step_is_an_error(run):
    assert "second gradient" in run[1]["second backward"]


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(run):
    got = run[1]["resume"]
    assert "error" not in got, got["error"]
    assert got["equal"]
    assert "CAME" in got["message"] and "LOMO" in got["message"]
