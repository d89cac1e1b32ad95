"""What ``plan`` knows of models: their parameters, their activations, and which of them fit."""

import itertools
import json

import pytest
import torch
import transformers

import ds_ext
from benchmarks import memory as measured
from ds_ext.commands.cli import main
from ds_ext.config import optimizer_names
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.planner import activations, memory, models
from ds_ext.planner.activations import MicroBatch
from ds_ext.planner.memory import GradientLifetime
from tests.common.apart import refused
from tests.common.choose import params
from tests.integration.test_cli import CONFIG, HEADS, SIZES, plan

KINDS = {
    "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 32, "head_dim": 16, **HEADS},
    "mixtral": {"num_local_experts": 4, **HEADS},
    "deepseek_v3": {"n_routed_experts": 16, "moe_intermediate_size": 32, "n_group": 4}
    | {"num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "gemma3_text": {"head_dim": 16, **HEADS},
}
# As published with the weights.
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.3-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "mistral-small-24b": 23_572_403_200,
}


def test_known_models_have_their_parameters():
    found = {
        name: memory.elements(memory.shapes_of(models.skeleton(models.config(name))))
        for name in models.KNOWN
    }
    assert found == PARAMETERS


@pytest.fixture
def folder(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    return tmp_path


def small(**changed):
    sizes = {**SIZES, "vocab_size": 301, "num_hidden_layers": 3, "use_cache": False}
    return transformers.LlamaConfig(**{**sizes, **HEADS, **changed})


CHUNKED = "--batch-splits 4 --chunked-loss"
HOW = "", "--checkpointing", "--batch-splits 2", CHUNKED
STEPS = itertools.product(("adalomo", "flashadamw"), HOW)


@pytest.mark.parametrize("name, how", params(STEPS, [("flashadamw", ""), ("adalomo", CHUNKED)]))
def test_the_total_is_that_of_a_real_step(name, how, folder, capsys):
    def measure():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(CONFIG).train()
        if how == "--checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        elif how:
            ds_ext.split_batch(model, int(how.split()[1]))
            ds_ext.chunk_loss(model, None if "chunked" in how else 0)
        optimizer = OPTIMIZERS[name](model.parameters())
        ds_ext.fuse_into_backward(model, optimizer)
        tokens = torch.randint(0, 3001, (4, 96))

        def step():
            model(tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()

        return measured.peak_of_second(step, [*model.parameters(), *model.buffers()])

    real = measure()
    asked = ["--model", folder, "--dtype", "fp32", "--optimizer", name, "--stage", 0]
    asked += ["--seq", 96, "--batch", 4, *how.split()]
    row = plan(capsys, *asked)[1][f"{OPTIMIZERS[name].__name__}, ZeRO-0"]
    assert float(row["total"]) == pytest.approx(real / 2**20, rel=0.02)
    assert float(row["activations"]) > 0.1 * float(row["total"])


def test_gradients_that_wait_count():
    def of(gradients):
        return activations.peak(small(), torch.float32, MicroBatch(1, 8, False), gradients)

    config = small()
    n = memory.elements(memory.shapes_of(models.skeleton(config)))
    all_of_them, none = of(GradientLifetime(None)), of(GradientLifetime(0))
    assert all_of_them > 4 * n > none
    assert (
        none < of(GradientLifetime(30_000)) < of(GradientLifetime(30_000, behind=1)) < all_of_them
    )


@pytest.mark.slow
def test_gradients_of_a_leaf_module_wait_for_each_other():
    def of(together):
        lifetime = GradientLifetime(1, together=together)
        batch = MicroBatch(1, 4, False, splits=2)
        return activations.peak(small(vocab_size=50), torch.float32, batch, lifetime)

    layer = 2 * (64 + 64 * 64 + 64 * 32) + 3 * 64 * 96  # of the model's three
    assert of(True) > 4 * layer > 2 * of(False)


@pytest.mark.parametrize("name", params([*KINDS], []))
def test_activations_of_other_kinds_of_models(name):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 301, "intermediate_size": 96}
    config = transformers.AutoConfig.for_model(name, **sizes, **KINDS[name])
    one, two = (
        activations.peak(config, torch.bfloat16, MicroBatch(rows, 64, False), GradientLifetime(0))
        for rows in (2, 4)
    )
    assert 1.5 < two / one < 2.1


def test_a_model_that_cannot_be_run_is_told():
    config = transformers.ViTConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(ValueError, match="--seq: activations of ViTConfig cannot be counted"):
        activations.peak(config, torch.float32, MicroBatch(1, 8, False), GradientLifetime(0))


# In the second case, gradients' peak hides the memory of activations of a few rows.
@pytest.mark.parametrize("tokens, bucket, mib", [(64, 20_000, 5), (2, 10**8, 8)])
def test_a_plan_with_activations_and_the_largest_batch(tokens, bucket, mib, folder, capsys):
    asked = ["--model", folder, "--ranks", 2, "--seq", tokens, "--dtype", "fp32"]
    asked += ["--optimizer", "adalomo", "--stage", 3, "--bucket", bucket]
    card = mib / 1024
    heading, rows = plan(capsys, *asked, "--batch", 2, "--memory", card)
    assert f"2 rows of {tokens} tokens each" in heading
    row = rows["AdaLomo, ZeRO-3"]
    assert (float(row["activations"]) > 0.5) == (tokens == 64)
    most = int(row[f"in {card:g} GiB"].removeprefix("batch "))
    sizes = [
        float(plan(capsys, *asked, "--batch", rows)[1]["AdaLomo, ZeRO-3"]["total"])
        for rows in (most, most + 1)
    ]
    assert sizes[0] <= mib + 0.01 and sizes[1] >= mib - 0.01


@pytest.fixture
def configured(folder, capsys):
    def run(config, *options):
        path = folder / "ds.json"
        path.write_text(json.dumps(config))
        return plan(capsys, "--model", folder, "--config", path, *options)

    return run


def test_a_config_says_what_options_do(configured, folder, capsys):
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "CAME", "params": {"lr": "auto", "weight_update": "master"}},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 1000,
            "offload_param": {"device": "cpu"},
        },
    }
    params = ["--params", '{"weight_update": "master"}', "--bucket", 1000, "--accumulate"]
    asked = ["--optimizer", "came", "--stage", 3, "--offload-param", *params]
    assert configured(config) == plan(capsys, "--model", folder, *asked)
    assert "LOMO, ZeRO-3, param offloaded" in configured(config, "--optimizer", "lomo")[1]


def test_numbers_of_a_config_may_be_text(configured):
    def rows(**config):
        return configured(config | {"optimizer": {"type": "CAME"}})

    zero, bf16 = {"stage": 3, "reduce_bucket_size": 1000}, {"enabled": True}
    expected = rows(zero_optimization=zero, bf16=bf16)
    zero, bf16 = {"stage": "3", "reduce_bucket_size": "1000"}, {"enabled": "true"}
    assert rows(zero_optimization=zero, bf16=bf16) == expected
    assert rows(zero_optimization=True) == rows(zero_optimization={"stage": 1})


def test_optimizers_of_deepspeed_in_a_config_are_its_own(configured):
    assert optimizer_names.deepspeeds() == optimizer_names._DEEPSPEEDS
    _, rows = configured({"optimizer": {"type": "AdamW"}, "fp16": {"enabled": "auto"}})
    assert {"AdaLomo, ZeRO-0", "AdamW, DeepSpeed ZeRO-0"} < rows.keys()  # all, beside AdamW


def test_offload_says_what_the_host_holds(capsys):
    given = ["--model", "llama-3.1-8b", "--optimizer", "came", "--stage", 3]
    rows = plan(capsys, *given, "--offload-param", "--offload-optimizer")[1]
    (row,) = [row for label, row in rows.items() if label.startswith("CAME")]
    whole = plan(capsys, *given)[1]["CAME, ZeRO-3"]
    moved = float(whole["weights"]) + float(whole["state"])
    assert float(row["on the host"]) == pytest.approx(moved, rel=0.01)
    assert "on the host" not in whole


def test_models_that_are_built_in_no_longer_have_a_name_on_the_hub(capsys):
    told = refused(capsys, "plan", "--model", "Llama-2-7B")
    assert "use its Hub name, meta-llama/Llama-2-7b-hf" in " ".join(told.split())
    assert not models.REMOVED.keys() & models.KNOWN.keys()
    assert len(models.KNOWN) <= 15


# One rank reads its own weights.
GATHERS = {"3 --ranks 2": True, "3 --offload-param": True, "3": False, "2 --ranks 2": False}


@pytest.mark.parametrize("stage, gathers", GATHERS.items())
def test_what_is_not_counted_is_named(stage, gathers, folder, capsys):
    assert main(["plan", "--model", str(folder), "--stage", *stage.split()]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("ZeRO-3 gathers" in said) is gathers and "clipping to a norm" in said
