"""``python -m ds_ext check``: what is wrong in a config, as a run would say it."""

import json
import re
import time

import pytest
import transformers

from ds_ext.commands import config as configs
from ds_ext.commands.cli import main
from ds_ext.config import optimizer_names
from ds_ext.config.parsing import lookup
from tests import worlds
from tests.common.apart import refused
from tests.distributed import wrong_configs_jobs
from tests.distributed.wrong_configs_jobs import JUDGED, SIZES


def printed(config, tmp_path, capsys, *options):
    """What is printed of a config; the exit code says whether there are errors."""
    path = tmp_path / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    code = main(["check", str(path), *map(str, options)])
    said = capsys.readouterr().out
    assert code == bool(re.search("(?m)^error: ", said))
    return said


def checked(*given):
    lines = printed(*given).splitlines()
    return [[x for x in lines if x.startswith(k)] for k in ("error: ", "note: ")]


def changed(**keys):
    return configs.make("adalomo", 3, numbers=True) | keys


def optimizer(**params):
    return {"optimizer": {"type": "AdaLomo", "params": params}}


def test_keys_of_ours_for_anothers_optimizer_are_told(tmp_path, capsys):
    theirs = {"type": "AdamW", "params": {"nbits": 8, "param_groups": []}}
    errors, _ = checked(changed(optimizer=theirs), tmp_path, capsys)
    assert [error.partition(" is a setting of ds_ext")[0] for error in errors] == [
        "error: optimizer.params.nbits = 8",
        "error: optimizer.params.param_groups = []",
    ]


def test_auto_that_nobody_fills_in_is_wrong_beside_those_that_hf_does(tmp_path, capsys):
    zero = {"zero_optimization": {"stage": 3, "overlap_comm": "auto"}}
    told = "nobody fills in: zero_optimization.overlap_comm."
    errors, (note,) = checked(changed(**zero), tmp_path, capsys)
    assert not errors and told in note
    (error,), _ = checked(changed(**zero, steps_per_print="auto"), tmp_path, capsys)
    assert told in error


def saved_model(folder, width=32):
    """Saves the config of a small Llama -> the options that name it."""
    sizes = {"vocab_size": 99, "hidden_size": width, "intermediate_size": 2 * width}
    model = transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    model.save_pretrained(folder)
    return "--model", folder


def test_batch_sizes_have_to_fit_the_ranks(tmp_path, capsys):
    sizes = changed(train_batch_size=8, train_micro_batch_size_per_gpu=2)
    assert checked(sizes, tmp_path, capsys) == [[], []]
    assert checked(sizes, tmp_path, capsys, "--ranks", 4)[0] == []
    (error,) = checked(sizes, tmp_path, capsys, "--ranks", 3)[0]
    assert "train_batch_size is not equal to" in error and "8 != 2 * 1 * 3" in error


def test_keys_that_deepspeed_reads_of_a_config_alone_are_known(tmp_path, capsys):
    sizes = {"sequence_parallel_size": 2, "data_parallel_size": 2}
    assert checked(changed(**sizes), tmp_path, capsys) == [[], []]


def test_with_a_model_it_is_told_what_steps_which_parameters(tmp_path, capsys):
    model, config = saved_model(tmp_path), configs.make("apollo", 2)
    before = time.monotonic()
    errors, notes = checked(config, tmp_path, capsys, *model)
    assert not errors and time.monotonic() - before < 20
    (apollo,) = (note for note in notes if note.startswith("note: APOLLO on"))
    (adamw,) = (note for note in notes if note.startswith("note: AdamW on"))
    assert "layers.*.mlp.up_proj.weight (2)" in apollo and "model.norm.weight" in adamw
    galore = configs.make("galoreadamw", 2)
    _, notes = checked(galore, tmp_path, capsys, *model)
    (adamw,) = (note for note in notes if "GaLoreAdamW, rank=None on" in note)
    assert "model.norm.weight" in adamw and "up_proj" not in adamw
    config["optimizer"]["params"]["target_modules"] = ["q_porj"]
    (error,) = checked(config, tmp_path, capsys, *model)[0]
    assert 'Did you mean "q_proj"?' in error
    errors, notes = checked(changed(**OFFLOADED), tmp_path, capsys, *model)
    assert not errors and any("has almost no effect: AdaLomo keeps" in note for note in notes)


@pytest.mark.parametrize("width, fits", [(32, False), (256, True)])
def test_int8_needs_a_large_matrix(width, fits, tmp_path, capsys):
    config = changed(ds_ext={"weight_storage": "int8"})
    errors, _ = checked(config, tmp_path, capsys, *saved_model(tmp_path, width))
    assert [] == errors if fits else "has no trainable matrix with at least 65,536" in errors[0]


def test_names_of_adapters_are_not_checked(tmp_path, capsys):
    config = changed(**optimizer(param_groups=[{"match": "lora_A", "type": "AdamW"}]))
    said = printed(config, tmp_path, capsys, *saved_model(tmp_path))
    assert "not checked: the names of LoRA's adapters" in said and "note: " not in said


NO_CONFIGS = {"{": "is not JSON", None: "No such file"}
NO_CONFIGS |= dict.fromkeys(["[1]", "\n"], "holds no JSON object")
NO_CONFIGS |= {'{"bf16": {}, "bf16": {}}': "the key bf16 is there twice"}


@pytest.mark.parametrize("text, words", NO_CONFIGS.items())
def test_a_file_that_is_no_config_is_named(text, words, tmp_path, capsys):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    assert words in refused(capsys, "check", path)


def test_optimizers_of_others_are_noted(tmp_path, capsys):
    _, notes = checked(changed(optimizer={"type": "AdamW"}), tmp_path, capsys)
    assert any("AdamW is DeepSpeed's or torch's own" in note for note in notes)


@pytest.mark.parametrize("scatters", [True, False])
def test_deepspeeds_muon_needs_a_key_at_stage_3(scatters, tmp_path, capsys):
    config = changed(zero_optimization={"stage": 3, "reduce_scatter": scatters})
    errors, _ = checked(config | {"optimizer": {"type": "Muon"}}, tmp_path, capsys)
    assert any('write "ds_ext.Muon"' in error for error in errors) == scatters


OFFLOADED = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
GROUP = {"match": "head", "type": "AdamW", "lr": 1e-4}
ACCEPTED = {
    "int8, and groups with more bits": (
        wrong_configs_jobs.INT8 | optimizer(param_groups=[GROUP | {"weight_update": "master"}])
    ),
    "defaults under DeepSpeed's": {"ds_ext": {"batch_splits": 1}, "optimizer": {"type": "AdamW"}},
    "state of some parameters": OFFLOADED | optimizer(param_groups=[GROUP]),
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_a_model_may_allow_is_no_error(what, tmp_path, capsys):
    assert checked(changed(**ACCEPTED[what]), tmp_path, capsys)[0] == []


@pytest.mark.parametrize("number", range(len(JUDGED)))
def test_check_and_a_run_judge_alike(number, tmp_path, capsys):
    key, changes = JUDGED[number]
    (runs,) = worlds.once(1, wrong_configs_jobs.judged)
    config = SIZES | wrong_configs_jobs.RIGHT | changes
    errors, notes = checked(config, tmp_path, capsys, "--ranks", 1)
    assert [error.removeprefix("error: ") for error in errors] == runs[number].error.splitlines()
    assert bool(errors) == (key is not None)
    if isinstance(key, list):
        assert len(errors) == len(key)
        assert all(any(words in error for error in errors) for words in key), errors
    else:
        assert (key or "") in runs[number].error
    if not errors:
        said = {note.removeprefix("note: ") for note in notes if '"auto", which' not in note}
        assert said <= {*runs[number].log}
        lr, name = (lookup(changes, key) for key in ("optimizer.params.lr", "scheduler.type"))
        assert any("is small for AdaLomo" in note for note in said) == (lr == 1e-5)
        replaces = lr == 5e-3 or (lr == 1e-2 and name == "WarmupDecayLR")
        assert any("replaces the learning rates" in note for note in said) == replaces
        assert any("is large for AdaLomo: start at" in note for note in said) == (lr == 10.0)
        assert any("has no effect" in line for line in runs[number].log) == any(
            "has no effect" in note for note in said
        )


@pytest.mark.parametrize("number", range(len(wrong_configs_jobs.UNKNOWN)))
def test_a_run_warns_of_an_unknown_key_and_check_refuses_it(number, tmp_path, capsys):
    (runs,) = worlds.once(1, wrong_configs_jobs.judged)
    words, changes = list(wrong_configs_jobs.UNKNOWN.items())[number]
    config, run = SIZES | wrong_configs_jobs.RIGHT | changes, runs[len(JUDGED) + number]
    (error,) = checked(config, tmp_path, capsys, "--ranks", 1)[0]
    assert "unknown key" in error and words in error
    assert not run.error and run.log.count(error.removeprefix("error: ")) == 1


def test_comments_in_a_config_are_read_as_deepspeed_reads_them(tmp_path, capsys):
    text = json.dumps(SIZES | wrong_configs_jobs.RIGHT | {"ds_ext": {"polcy": 1}}, indent=1)
    commented = text.replace('"ds_ext"', '# ours\n "ds_ext"')
    errors, (note,) = checked(commented, tmp_path, capsys)
    assert [errors, []] == checked(text, tmp_path, capsys)
    assert "not strict JSON, which HF Trainer and accelerate read" in note
    assert optimizer_names.concerns_us(str(tmp_path / "ds.json"))


def test_a_config_for_trainers_is_strict_json(tmp_path, capsys):
    text = json.dumps(configs.make("adalomo", 3), indent=1)
    without_comma = text.replace("3,\n", "3\n", 1)
    assert without_comma != text and checked(text, tmp_path, capsys)[0] == []
    (error,), _ = checked(without_comma, tmp_path, capsys)
    assert "not strict JSON" in error and "Expecting ',' delimiter: line" in error


def test_only_a_misspelt_optimizer_makes_a_config_ours():
    """Sections of other programs may have a type of this name."""
    section = {"type": "AdaLomo"}
    assert optimizer_names.concerns_us({"optimzer": section})
    assert not optimizer_names.concerns_us({"teacher": section})
    other = {"optimizer": {"type": "Adam"}, "optimizers": section}
    assert not optimizer_names.concerns_us(other)
    noted = {"optimizer": {"type": "Adam", "compared_with": "CAME"}}
    assert not optimizer_names.concerns_us(noted)


@pytest.mark.parametrize("is_cast", [False, True])
def test_the_dtype_of_weights_in_8_bits_is_not_checked_unless_it_is_set(is_cast, tmp_path, capsys):
    keys = {"ds_ext": {"weight_storage": "int8"}, "zero_optimization": {"stage": 3}}
    said = printed(changed(**keys, bf16={"enabled": is_cast}), tmp_path, capsys)
    assert ("not checked: ds_ext.weight_storage" in said) is not is_cast


def test_what_needs_a_model_or_ranks_is_named(tmp_path, capsys):
    zero = {"stage": 3, "zero_hpz_partition_size": 2}
    keys = optimizer(param_groups=[GROUP]) | {"zero_optimization": zero}
    said = printed(changed(**keys), tmp_path, capsys)
    assert "not checked: optimizer.params.param_groups" in said and "give --model" in said
    assert "not checked: zero_optimization.zero_hpz" in said and "give --ranks" in said
    assert said.endswith("nothing is wrong in what was checked\n")
    (error,) = checked(changed(**keys), tmp_path, capsys, "--ranks", 3)[0]
    assert "zero_hpz_partition_size = 2 does not divide the 3 ranks" in error


def test_auto_is_for_trainers(tmp_path, capsys):
    said = printed(configs.make("adalomo", 3), tmp_path, capsys)
    assert "nothing is wrong for HF Trainer and accelerate; deepspeed.initialize needs" in said
    config = changed(zero_optimization={"stage": "auto"}, train_micro_batch_size_per_gpu=1)
    errors, (note,) = checked(config, tmp_path, capsys)
    assert not errors and "accelerate fill in: zero_optimization.stage" in note


def test_a_missing_optimizer_is_said_first(tmp_path, capsys):
    config = configs.make("adalomo", 3) | {"ds_ext": {"clip_mode": "previous"}}
    del config["optimizer"]
    notes = checked(config, tmp_path, capsys)[1]
    assert "no optimizer is named" in notes[0] and 'refuses the section "ds_ext"' in notes[0]


def test_batch_sizes_that_need_the_ranks_are_named(tmp_path, capsys):
    for size, is_named in ((7, True), ("auto", False)):
        sizes = {"train_batch_size": size, "train_micro_batch_size_per_gpu": 2}
        said = printed(changed(**sizes), tmp_path, capsys)
        assert ("not checked: train_batch_size" in said) is is_named


def test_accumulation_counts_where_the_ranks_are_not_known(tmp_path, capsys):
    keys = {"gradient_accumulation_steps": 4, "data_types": {"grad_accum_dtype": "bf16"}}
    assert checked(changed(**keys), tmp_path, capsys) == [[], []]
    keys["train_micro_batch_size_per_gpu"] = "auto"
    assert checked(changed(**keys), tmp_path, capsys, "--ranks", 2)[0] == []
