"""Matrices of training runs, `make compare` and `benchmarks trends`: which run is next, what is
kept of it, and what the page says."""

import json
import math
import re
import sys
import threading
import types

import pytest
import torch
import transformers
from torch.nn import functional as F

from benchmarks import __main__ as benchmarks
from benchmarks.matrix import forgetting, search, summary, texts, training
from benchmarks.matrix.candidates import CANDIDATES
from benchmarks.matrix.lines import Lines, loss_of, point_of
from tests import worlds
from tests.common import apart
from tests.integration.test_examples import EXAMPLES, make_model

SETUP = {"steps": 3}


def parabola(centre):
    """A loss that is least at a rate, infinite beyond thirty times of it."""

    def loss(point):
        away = math.log10(point.lr / centre[point.candidate])
        return math.nan if away > 1.5 else 1 + away**2 + 0.01 * point.seed

    return loss


def follow(lines, starts, data, loss):
    """Makes the runs that are wanted one after another -> their points."""
    made = []
    while (point := search.next_run(lines, starts, data, seeds=3)) and len(made) < 1000:
        lines.add(point._asdict() | {"loss": loss(point), "accuracy": 0.5, "machine": "m"})
        made.append(point)
    return made


@pytest.mark.parametrize("centre", [1e-6, 3e-5, 4.4e-4, 1e-2, 0.1])  # from 3e-4, 1e-6 diverges
def test_the_best_rate_has_others_on_both_sides_and_three_seeds(tmp_path, centre):
    lines, starts = Lines(tmp_path, SETUP), [{"a": 3e-4}, {"b": 1e-2}]
    made = follow(lines, starts, ["one", "two"], parabola({"a": centre, "b": 1e-2}))
    assert len(made) == len(set(made))
    for data in ("one", "two"):
        found = summary.best_of(lines, data, "a")
        assert not found.is_at_edge and len(found.tried) >= 5 and len(found.losses) == 3
        assert abs(math.log10(found.lr / centre)) < 0.17  # the nearest of a grid and its halves


def test_a_rate_that_was_best_by_chance_is_beaten_by_the_second(tmp_path):
    def loss(point):
        lucky = {1e-3: 1.0, 3e-4: 1.1, 5e-4: 1.05}.get(point.lr, 2.0)
        return lucky + (0.3 if point.lr == 1e-3 else 0.02) * point.seed

    lines = Lines(tmp_path, SETUP)
    made = follow(lines, [{"a": 1e-3}], ["one"], loss)
    assert [(p.lr, p.seed) for p in made[-4:]] == [(1e-3, 1), (1e-3, 2), (5e-4, 1), (5e-4, 2)]
    found = summary.best_of(lines, "one", "a")
    assert (found.lr, found.losses) == (5e-4, [1.05, 1.07, 1.09])
    assert found.near == [1e-3]  # with the first seed


def test_losses_are_compared_seed_by_seed(tmp_path):
    lines = Lines(tmp_path, SETUP)
    for name, losses in {"a": [1.0, 3.0], "b": [1.5, 3.7, 9.0]}.items():
        for seed, loss in enumerate(losses):
            point = search.Point("one", name, 1e-3, seed)
            lines.add(point._asdict() | {"loss": loss, "accuracy": 0.0})
    a, b = (summary.best_of(lines, "one", name) for name in "ab")
    assert summary.less(b, a) == "+0.600 ± 0.141 (n = 2)"  # 0.5 and 0.7


def test_lines_last(tmp_path):
    lines = Lines(tmp_path, SETUP)
    point = search.Point("one", "a", 1e-3, 0)
    lines.add(point._asdict() | {"loss": math.nan})
    Lines(tmp_path, {"steps": 4}).add(point._asdict() | {"loss": 1.0})
    path = tmp_path / "one.jsonl"
    path.write_text(path.read_text() + '{"data": "one", "cand')  # the process was killed
    (again,) = Lines(tmp_path, SETUP).all  # neither that, nor what has other steps
    assert point_of(again) == point and again["loss"] is None and loss_of(again) == math.inf
    assert json.loads(path.read_text().splitlines()[1])["loss"] == 1.0


class Letters:
    """A tokenizer: a token for each byte."""

    eos_token = "\0"

    def __call__(self, text, add_special_tokens):
        return {"input_ids": list(text.encode())}


@pytest.mark.parametrize("data", texts.DATA)
def test_answers_alone_are_learnt(data):
    rows = texts.rows(data, "test", Letters(), 400)
    batch = texts.batch(rows[:3])
    for i, row in enumerate(rows[:3]):
        learnt = batch["labels"][i][batch["labels"][i] != -100]
        asked = bytes(row.ids[: row.asked]).decode()
        assert asked.startswith("<|im_start|>user") and asked.endswith("assistant\n")
        assert bytes(learnt.tolist()).decode()[-1] == "\0" or len(row.ids) == 400
        assert len(learnt) + row.asked == len(row.ids) == batch["attention_mask"][i].sum()
    train = {bytes(row.ids[: row.asked]) for row in texts.rows(data, "train", Letters(), 400)}
    assert not train & {bytes(row.ids[: row.asked]) for row in rows}  # no question is in both
    assert max(len(row.ids) for row in texts.rows(data, "test", Letters(), 160)) <= 160


def tiny():
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "tie_word_embeddings": True, "use_cache": False}
    tokens = {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **tokens))


def test_accuracy_is_what_greedy_decoding_gives():
    model = tiny()
    given = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]
    rows = []
    for i, ids in enumerate(given):
        asked = torch.tensor([ids])
        said = model.generate(asked, max_new_tokens=3, do_sample=False)[0].tolist()
        if i == 1:
            said[-1] += 1  # its last token is wrong
        rows.append(texts.Row(said, len(ids)))
    found = training.measure(model, texts.held_out(rows, size=2))
    assert found.accuracy == pytest.approx(2 / 3)
    losses = [_answer_losses(model, row) for row in rows]
    assert found.loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def _answer_losses(model, row):
    with torch.no_grad():
        logits = model(torch.tensor([row.ids])).logits[0]
    return F.cross_entropy(
        logits[row.asked - 1 : -1], torch.tensor(row.ids[row.asked :]), reduction="none"
    )


def test_forgetting_estimates_the_divergence_from_the_model_before():
    before, after = tiny(), tiny()
    with torch.no_grad():
        for model, seed in ((before, 1), (after, 2)):  # a new model is close to uniform
            for p in model.parameters():
                p.add_(
                    torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)), alpha=0.3
                )
    text = forgetting.written(before, 3, rows=400, tokens=20)
    ids = torch.cat([batch["input_ids"] for batch in text])
    assert ids.shape == (400, 20) and (ids[:, 0] == 3).all()
    with torch.no_grad():
        p, q = (model(ids).logits[:, :-1].log_softmax(-1) for model in (before, after))
    divergence = float((p.exp() * (p - q)).sum(-1).mean())
    losses = [training.measure(model, text).loss for model in (before, after)]
    assert divergence > 0.1
    assert losses[1] - losses[0] == pytest.approx(divergence, rel=0.1)
    again = forgetting.written(before, 3, rows=400, tokens=20)
    assert torch.equal(again[0]["input_ids"], text[0]["input_ids"])


STEPS, LR = 5, 1e-2


def data():
    rows = texts.rows("sounds", "train", Letters(), 120)
    return texts.batches(rows, 2, STEPS, 0), texts.held_out(rows[:8])


def line(name):
    return training.run(tiny(), CANDIDATES[name], LR, 0, *data())


@pytest.mark.parametrize("name", ["deepspeed-adamw", "adamw"])
def test_a_run_is_the_schedule_of_plain_torch(name):
    (found,) = worlds.once(1, line, name)
    model, (batches, tests) = tiny(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    losses = []
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = LR * training.schedule(step, STEPS)
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert found["train"] == pytest.approx(losses, abs=2e-4)
    assert found["loss"] == pytest.approx(training.measure(model, tests).loss, abs=2e-5)
    assert losses[-1] < losses[0] - 0.1  # by more than what is compared


@pytest.mark.slow
def test_a_small_matrix_is_made_once_and_shown(tmp_path):
    make_model(tmp_path / "model")
    folder = tmp_path / "lines"
    command = ["quality", "--quick", "--dtype", "fp32", "--steps", "2", "--optimizer", "lamb"]
    command += ["--model", str(tmp_path / "model"), "--lines", str(folder)]
    apart.python("-m", "benchmarks", *command, cwd=tmp_path)  # which joins a world of one
    made = (folder / "sounds.jsonl").read_text()
    written = folder / f"{command[0]}.md"
    page = written.read_text()
    written.unlink()
    benchmarks.main([*command, "--report"])
    assert written.read_text() == page
    benchmarks.main([*command, "--optimizer", "lion", "--report"])
    assert "| LAMB |" in written.read_text()  # what is stored is shown
    assert (folder / "sounds.jsonl").read_text() == made
    kept = Lines(folder, {"steps": 2, "held_out": 16, "model": "model"}).all
    assert len({point_of(x) for x in kept}) == len(kept) >= 5
    least = min(kept, key=loss_of)
    assert f"| LAMB | {least['lr']:g} | {least['loss']:.3f} (n = 1) |" in page


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield __import__("turns")
    del sys.modules["turns"]


def test_two_runs_of_two_ranks_take_their_steps_in_turns(turns):
    store, log, steps = turns.serve(), [], 3

    def train(run, rank):
        own = turns.Turns(f"{store.port},{run}")
        args = types.SimpleNamespace(world_size=2, process_index=rank)
        for step in range(steps):
            own.on_step_begin(args, types.SimpleNamespace(global_step=step), None)
            log.append((step, run))
        own.on_train_end(args, types.SimpleNamespace(global_step=steps), None)

    threads = [threading.Thread(target=train, args=(i % 2, i // 2)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    # Both ranks of a run take a step, then both of the other.
    assert log == sorted(log) and len(log) == 4 * steps


@pytest.mark.slow
def test_compare_measures_adamw_and_adalomo_on_the_same_batches(tmp_path):
    model = tmp_path / "tiny-llama"
    make_model(model)
    options = ["--ranks=1", "--steps=6", "--evaluations=2", "--dtype=fp32", "--max-length=32"]
    rates = ["--lr=1e-2", "--adamw-lr=1e-2"]
    script = str(EXAMPLES / "compare.py")
    apart.python(script, f"--model={model}", f"--out={tmp_path}", *options, *rates)
    adamw, adalomo = json.loads((tmp_path / "compare.json").read_text())["runs"]
    assert [adamw["optimizer"], adalomo["optimizer"]] == ["AdamW", "AdaLomo"]
    for run in (adamw, adalomo):
        assert len(run["seconds"]) == len(run["train_loss"]) == 6 and min(run["seconds"]) > 0
        assert [step for step, _ in run["held_out_loss"]] == [0, 3, 6]
        assert run["held_out_loss"][-1][1] < run["held_out_loss"][0][1] - 0.05
        assert run["peak"] > sum(run["live"].values()) and min(run["live"].values()) > 0
    # The first loss comes before any update: the same batch, the same weights.
    assert adamw["train_loss"][0] == pytest.approx(adalomo["train_loss"][0], rel=1e-5)
    assert adamw["held_out_loss"][0] == pytest.approx(adalomo["held_out_loss"][0], rel=1e-5)
    n = adamw["live"]["weights"] / 4
    assert n == adalomo["live"]["weights"] / 4 > 10**6
    kept = [run["live"]["optimizer state, buffers"] for run in (adamw, adalomo)]
    assert kept[0] - kept[1] > 16 * n  # two moments, an fp32 copy and the gradients
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_trends_are_measured(tmp_path):
    apart.python("-m", "benchmarks", "trends", "--quick", "--out", str(tmp_path))
    for name in ("parameters", "ranks", "buckets"):
        rows = [x for x in (tmp_path / f"trends_{name}.md").read_text().splitlines() if "|" in x]
        assert len(rows) > 3 and any(re.search(r"\| \d+\.\d+", row) for row in rows)
