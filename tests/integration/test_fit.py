"""``plan --fit``: the steps to a config that fits, and the config that it writes."""

import json
import re

import pytest
import torch
import transformers

from ds_ext import rates
from ds_ext.commands.cli import main
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.planner import fit as fit_steps
from ds_ext.planner import options
from tests import worlds
from tests.common.apart import refused
from tests.common.choose import params
from tests.integration.test_cli import HEADS, SIZES, plan, read
from tests.tools import way_down

WIDE = {"vocab_size": 5_000, "hidden_size": 256, "intermediate_size": 1024}
CONFIG = transformers.LlamaConfig(**SIZES | WIDE, **HEADS, tie_word_embeddings=False)
MIB = 1 / 1024  # GiB
BUCKET, SMALL = 2**22, 2**14  # elements; the default, and that of the step to smaller buckets


@pytest.fixture
def folder(tmp_path):
    CONFIG.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def fitted(folder, tmp_path, capsys):
    """Runs ``plan --fit`` -> what it prints, and the config that it writes."""

    def run(*given):
        path = tmp_path / "ds.json"
        path.unlink(missing_ok=True)
        assert main(["plan", "--model", str(folder), *map(str, given), "--fit", str(path)]) == 0
        return capsys.readouterr().out, json.loads(path.read_text())

    return run


@pytest.fixture
def fit(fitted, monkeypatch):
    """The rows of the table, and the config; with limits in the proportion of the small model."""
    monkeypatch.setattr(options, "gpu_bucket_size", lambda *_: BUCKET)  # whatever --memory is
    monkeypatch.setattr("ds_ext.planner.fit.BUCKET_SIZE", SMALL)
    monkeypatch.setattr("ds_ext.forward.chunked_loss.CHUNK_LOGITS", 2**22)

    def run(*given, seq=256):
        said, config = fitted("--seq", seq, *given)
        return read(said)[1], config

    return run


@pytest.fixture
def total(folder, tmp_path, capsys):

    def run(config, seq=256, ranks=1, card=100):
        path = tmp_path / "again.json"
        path.write_text(json.dumps(config))
        given = ("--model", folder, "--seq", seq, "--ranks", ranks, "--config", path)
        row = next(iter(plan(capsys, *given, "--memory", card * MIB)[1].values()))
        assert row[f"in {card * MIB:g} GiB"].startswith("batch ") or card == 100
        return float(row["total"])

    return run


def paths(config):
    """The keys of a config that a step has set, each as (section, key)."""
    sections = {"ds_ext", "zero_optimization"}
    fixed = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    fixed["reduce_bucket_size"] = BUCKET
    return [(s, k) for s in sections for k, x in config.get(s, {}).items() if fixed.get(k) != x]


# Steps that the cards of a sweep need, by rows.
STEPS = {
    1: {"FlashAdamW", "AdaLomo", "checkpointing"},
    4: {"FlashAdamW", "layers run 2 pieces of the batch"},
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", STEPS)
def test_the_config_fits_and_has_no_needless_step(rows, fit, total, folder, tmp_path, capsys):
    table, _ = fit("--batch", rows, "--memory", 100)
    (start,) = table.values()  # everything fits
    card, seen = float(start["total"]) - 0.02, set()
    while True:
        try:
            table, config = fit("--batch", rows, "--memory", card * MIB)
        except SystemExit:  # nothing fits
            break
        names = [name.partition(" (")[0] for name in table]
        totals = [float(row["total"]) for row in table.values()]
        seen |= {*names[1:]}
        assert totals[0] == float(start["total"]) and totals[-1] <= card + 0.005
        for before, after, row in zip(totals, totals[1:], [*table.values()][1:], strict=False):
            assert (
                float(row["saves"]) == pytest.approx(before - after, abs=0.011) and after < before
            )
        assert total(config, card=card) == pytest.approx(totals[-1], abs=0.011)
        for section, key in paths(config):
            fewer = {k: dict(v) if k == section else v for k, v in config.items()}
            del fewer[section][key]
            assert total(fewer) >= card - 0.005, f"{card} MiB need no {key}"
        path = tmp_path / "ds.json"
        assert main(["check", str(path), "--model", str(folder), "--ranks", "1"]) == 0
        assert "nothing is wrong" in capsys.readouterr().out
        card = min(totals[-1] - 0.02, 0.6 * card)
    assert seen >= STEPS[rows]


@pytest.mark.slow
@pytest.mark.parametrize("ranks, stage, card", [(1, 2, 19), (2, 3, 16)])
def test_weights_in_int8_are_a_step_if_they_suffice(fit, total, tmp_path, ranks, stage, card):
    deep = SIZES | WIDE | {"vocab_size": 500, "num_hidden_layers": 12}
    transformers.LlamaConfig(**deep, **HEADS).save_pretrained(tmp_path / "model")
    given = ("--ranks", ranks, "--optimizer", "adalomo", "--bucket", SMALL, "--memory")
    step = "weights in int8 (more noise in each update)"
    table, config = fit(*given, card * MIB, seq=8)
    assert [*table][-1] == step and float(table[step]["total"]) == pytest.approx(
        total(config, seq=8, ranks=ranks), abs=0.011
    )
    assert config["ds_ext"]["weight_storage"] == "int8"
    assert config["zero_optimization"]["stage"] == stage
    assert float(table[step]["saves"]) > 4
    # Offload of weights saves more.
    table, config = fit(*given, float(table[step]["total"]) * MIB - 2 * MIB, seq=8)
    assert step not in table and "offload_param" in config["zero_optimization"]


@pytest.mark.parametrize("name", params([*way_down.WAYS], []))
def test_each_total_is_that_of_training_with_the_config(name):
    (steps,) = worlds.once(1, way_down.way, name, limit=400)
    page = way_down.shown(name)
    for step, (label, planned, measured) in zip(steps, page, strict=False):
        assert step.planned == pytest.approx(step.measured, rel=0.02), step
        assert step.losses[1] < step.losses[0]
        assert label == step.name, "stale: run `python -m tests.tools.way_down`"
        assert planned == pytest.approx(step.planned / 2**20, abs=0.01)
        assert measured == pytest.approx(step.measured / 2**20, rel=0.02)
    host = {"device": "cpu"}
    last, keys = steps[-1].config, paths(steps[-1].config)
    zero, own = last["zero_optimization"], last.get("ds_ext", {})
    for step in steps[1:]:
        kind = step.name.partition(" of ")[0]
        wanted = {
            "chunked loss": own.get("chunked_loss") is True,
            "checkpointing": own.get("batch_splits") == 2,
            "layers run 2 pieces": own.get("batch_splits") == 2,
            "layers run 4 pieces": own.get("batch_splits") == 4,
            "buckets": zero["reduce_bucket_size"] == way_down.SMALL,
            "optimizer states in host memory": zero.get("offload_optimizer") == host,
            "weights in host memory": zero.get("offload_param") == host,
        }
        assert wanted.get(kind, last["optimizer"]["type"] == step.name), step.name
    assert len(keys) == len([s for s in steps[1:] if s.name not in fit_steps.OPTIMIZERS])


def test_what_the_plan_leaves_of_the_card_is_told(fitted):
    told, _ = fitted("--seq", 8, "--memory", 10, "--optimizer", "lomo")
    assert re.search(r"The counted memory is [\d.]+ MiB of 10 GiB; what is not", told)


@pytest.mark.slow
def test_the_given_optimizer_stays(fit):
    given = ("--optimizer", "came", "--params", '{"weight_update": "master24"}', "--checkpointing")
    table, _ = fit(*given, "--ranks", 2, "--bucket", SMALL, "--memory", 100)
    (whole,) = [float(row["total"]) for row in table.values()]
    table, config = fit(*given, "--ranks", 2, "--bucket", SMALL, "--memory", (whole - 4) * MIB)
    assert [*table][1:] == ["optimizer states in host memory (moved in each step)"]
    assert config["optimizer"]["type"] == "CAME"
    assert config["optimizer"]["params"]["weight_update"] == "master24"
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


def test_other_options_are_in_the_config(fit):
    given = ("--dtype", "fp16", "--stage", 2, "--ranks", 4, "--accumulate")
    config = fit(*given, "--memory", 100)[1]
    assert config["fp16"] == {"enabled": True} and config["bf16"] == {"enabled": False}
    assert config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": BUCKET}
    assert config["ds_ext"] == {"gradient_policy": "sharded"}


@pytest.mark.parametrize("asked", [(), ("--accumulate",)])
def test_it_says_that_accumulation_is_to_be_set(asked, fitted):
    told, config = fitted("--seq", 8, "--memory", 8, "--optimizer", "GaLoreAdamW", *asked)
    assert ("Set gradient_accumulation_steps in it" in told) == bool(asked)
    kept = "sharded" if asked else None
    assert config.get("ds_ext", {}).get("gradient_policy") == kept


@pytest.mark.slow
def test_nothing_fits(folder, tmp_path, capsys):
    path = tmp_path / "ds.json"
    given = ("plan", "--model", folder, "--seq", 8, "--fit", path, "--memory", 0.001)
    told = refused(capsys, *given, "--batch", 2)
    assert "nothing fits 0.001 GiB. The smallest total is" in told
    assert "fewer --batch rows" in told and not path.exists()
    assert "--stage 3" not in told  # which is the default


@pytest.mark.slow
def test_one_row_is_not_split(fitted):
    given = ("--seq", 256, "--bucket", SMALL, "--memory", 26 * MIB, "--optimizer", "adalomo")
    told, config = fitted(*given)
    assert config["ds_ext"]["batch_splits"] == 2
    assert '"batch_splits" in it means checkpointing' in told


def test_an_existing_file_stays(folder, tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text("mine")
    told = refused(capsys, "plan", "--model", folder, "--seq", 8, "--memory", 8, "--fit", path)
    assert "the file exists: give another name" in told and path.read_text() == "mine"


@pytest.mark.slow
def test_a_config_for_hf_trainer_has_auto(fit, fitted, folder, tmp_path):
    given = ("--seq", 256, "--batch", 4, "--memory", 30 * MIB, "--bucket", SMALL, "--hf")
    told, config = fitted(*given)
    assert "--per_device_train_batch_size 4 --learning_rate 1e-3 --bf16 True" in told
    assert config["ds_ext"]["batch_splits"] > 1
    assert config["train_micro_batch_size_per_gpu"] == config["bf16"]["enabled"] == "auto"
    assert config["optimizer"]["params"]["lr"] == "auto"
    (losses,) = worlds.once(1, by_trainer, str(folder), str(tmp_path / "ds.json"))
    assert losses[-1] < losses[0]


def by_trainer(folder, path):
    """The losses of HF Trainer's steps with the arguments that ``plan`` names."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder)
    )
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 12
    given = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "bf16": True}
    given |= {"max_grad_norm": 0.0, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    arguments = transformers.TrainingArguments(
        output_dir=f"{folder}/out", deepspeed=path, use_cpu=True, **given
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


RATES = [("smollm2-135m", 1e-3, "measured on a model of 135M"), ("qwen3-8b", 5e-4, "LLaMA 7B")]


@pytest.mark.parametrize("model, rate, whose", RATES)
@pytest.mark.slow
def test_rates_are_those_of_the_models_size(model, rate, whose, fitted, capsys):
    given = ("--model", model, "--optimizer", "adalomo", "--memory", 900, "--seq", 8)
    said, config = fitted(*given)
    assert whose in said and "with warm-up, which you add: " in said
    assert config["optimizer"]["params"]["lr"] == rate
    assert main(["config", "adalomo", "--numbers", "--model", model]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["optimizer"]["params"]["lr"] == rate and whose in printed.err


def test_rates_from_scratch_are_not_written_for_large_models():
    for name in ("galoreadamw", "apollo", "scale", "lamb", "lomo"):
        assert rates.for_size(name, 8 * 10**9)[0] == rates.RATES[name].start
    assert "larger ones need lower rates" in rates.for_size("galoreadamw", 10**9)[1]
    for parameters, is_larger in ((8 * 10**9, False), (70 * 10**9, True)):
        lr, source = rates.for_size("adalomo", parameters)
        assert lr == 5e-4 and ("yours is larger" in source) == is_larger


def test_arguments_for_hf_trainer_name_the_weight_decay(fitted):
    """HF Trainer fills in its own default, 0, for an "auto" that no argument sets."""
    told, config = fitted("--seq", 8, "--memory", 8, "--optimizer", "flashadamw", "--hf")
    decay = OPTIMIZERS["flashadamw"].hypers().weight_decay
    assert f"--weight_decay {decay:g}" in told
    params = config["optimizer"]["params"]
    assert params["weight_decay"] == params["lr"] == "auto"
