"""Settings of a DeepSpeed config: each that cannot be honoured is refused by name."""

import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, get_zero_config

from ds_ext import settings
from ds_ext.backward import gradient_config
from ds_ext.config import config_checks, parsing
from ds_ext.engine import deepspeed_config
from ds_ext.errors import raise_all


def refuse(given):
    raise_all(config_checks.read(given).problems)


# (setting, values that are refused, values that are honoured, what the message must advise)
SETTINGS = [
    ("zero_optimization.offload_optimizer.super_offload", [True], [False], "remove it"),
    ("zero_optimization.offload_optimizer.device", ["nvme"], ["cpu", "none"], "not to NVMe"),
    ("zero_optimization.offload_param.device", ["nvme"], ["none"], "not to NVMe"),
    ("zero_optimization.offload_optimizer.ratio", [0.5], [1, 1.0], "remove it"),
    ("zero_optimization.offload_param.ratio", [0.5], [1, 1.0], "remove it"),
    ("zero_optimization.cpu_offload", [True], [False], "offload_optimizer"),
    ("zero_optimization.cpu_offload_param", [True], [False], "offload_param"),
    ("zero_optimization.zero_quantized_gradients", [True], [False], "gradients are then exact"),
    ("zero_optimization.zero_quantized_weights", [True], [False], "checkpoints load"),
    ("zero_optimization.zero_quantized_nontrainable_weights", [True], [False], "remove it"),
    ("zero_optimization.mics_shard_size", [2], [-1], "zero_hpz_partition_size"),
    ("zero_optimization.mics_hierarchical_params_gather", [True], [False], "remove it"),
    ("zero_optimization.zenflow", [{"topk_ratio": 0.1}, {}], [None], "remove it"),
    ("fp16.fp16_master_weights_and_grads", [True], [False], "weight_update"),
    ("bf16.bf16_master_weights_and_grads", [True], [False], "weight_update"),
    ("bf16.bf16_optimizer_states", [True], [False], "weight_update"),
    ("prescale_gradients", [True], [False], "remove it"),
    ("gradient_predivide_factor", [2.0], [1.0, 1], "remove it"),
    ("expert_parallel.expert_tensor_parallel_size", [2], [1], "remove it"),
    ("compile.deepcompile", [True], [False], "engine.compile()"),
    ("checkpoint.load_universal", [True], [False], "without ds_to_universal"),
    ("checkpoint.use_node_local_storage", [True], [False], "file system that all ranks share"),
    ("checkpoint.writer", [{"decoupled": True}], [None], "remove it"),
    ("datastates_ckpt", [{}, {"x": 1}], [False], "remove it"),
    ("nebula.enabled", [True], [False], "remove it"),
    ("ds_ext.shard_size", [1, 2, "2"], [0, None], "delete it"),
    ("ds_ext.sum_group_size", [2, "host"], [0, 1, False], "delete it"),
]
REFUSED = [(key, value, advice) for key, bad, _, advice in SETTINGS for value in bad]
HONOURED = [(key, value) for key, _, good, _ in SETTINGS for value in good]


def config(key, value):
    """A config that holds nothing but one setting, and the type of an optimizer of settings."""
    made = value
    for part in reversed(key.split(".")):
        made = {part: made}
    if "optimizer" in made:
        made["optimizer"]["type"] = "AdaLomo"
    return made


def test_the_table_holds_every_setting():
    refused = {key for key, setting in settings.SETTINGS.items() if setting.advice}
    assert refused == {key for key, *_ in SETTINGS}


@pytest.mark.parametrize("key, value, advice", REFUSED)
def test_a_setting_that_cannot_be_honoured_is_refused_by_name(key, value, advice):
    with pytest.raises(ValueError) as caught:
        refuse(config(key, value))
    message = str(caught.value)
    assert message.startswith(f"{key} = {value!r} ") and advice in message


@pytest.mark.parametrize("key, value", HONOURED)
def test_a_setting_that_is_honoured_passes(key, value):
    refuse(config(key, value))


# (setting, values that change nothing and are told of, values that are not told of)
WITHOUT_EFFECT = [
    ("optimizer.legacy_fusion", [True], [False, None]),
    ("zero_optimization.reduce_scatter", [False], [True, None]),
    ("zero_optimization.ignore_unused_parameters", [False], [True, None]),
    ("zero_optimization.cpu_offload_use_pin_memory", [True, False], [None]),
    ("checkpoint.checkpoint_serialization", [False], [True, None]),
]


def test_the_table_holds_every_setting_without_effect():
    ignored = {k for k, s in settings.SETTINGS.items() if s.no_effect and ".offload_" not in k}
    assert ignored == {key for key, *_ in WITHOUT_EFFECT}


@pytest.mark.parametrize("key, told, untold", WITHOUT_EFFECT)
def test_a_setting_without_effect_is_accepted_and_told_of(key, told, untold):
    for value in told:
        given = config(key, value)
        refuse(given)
        (line,) = config_checks.ignored(given, None)
        assert line.startswith(f"{key} = {value!r} has no effect: ")
    for value in untold:
        assert list(config_checks.ignored(config(key, value), None)) == []


def test_gradients_are_kept_where_they_have_to_be_and_nowhere_else():
    assert parsing.gradients({}) == gradient_config.GradientConfig()
    assert parsing.gradients({"gradient_accumulation_steps": 1}).policy == "fused"
    for kept in (
        {"gradient_accumulation_steps": 2},
        {"managed_gradient_accumulation": False},
        {"ds_ext": {"gradient_policy": "sharded"}},
    ):
        assert parsing.gradients(kept).policy == "sharded"


def test_clipping_and_the_dtype_of_kept_gradients():
    clipped = parsing.gradients({"gradient_clipping": 1})
    assert (clipped.max_norm, clipped.max_value, clipped.clip_mode) == (1.0, 0.0, "exact")
    section = {"clip_value": 0.5, "gradient_policy": "sharded"}
    bounded = parsing.gradients({"ds_ext": section, "data_types": {"grad_accum_dtype": "bf16"}})
    assert (bounded.max_norm, bounded.max_value) == (0.0, 0.5)
    assert bounded.accumulate_in == torch.bfloat16
    assert parsing.gradients({"gradient_clipping": None}).max_norm == 0


OTHERS = ("ds_ext.", "optimizer", "scheduler")
OF_DEEPSPEED = {k: s for k, s in settings.SETTINGS.items() if not k.startswith(OTHERS)}


@pytest.mark.parametrize("key", [k for k, s in OF_DEEPSPEED.items() if s.type != settings.SECTION])
def test_auto_is_as_if_the_key_were_absent(key):
    given, absent = config(key, "auto"), parsing.gradients({})
    refuse(given)
    read = parsing.normalized(given)
    assert parsing.gradients(read) == absent and absent.bucket_size is None
    assert parsing.log_lines(absent, 7, read) == parsing.log_lines(absent, 7, {})


def test_a_config_is_read_as_deepspeed_reads_it():
    """Text as numbers, by the model that DeepSpeed itself has for each section."""
    text = {"stage": "3", "reduce_bucket_size": "5000", "zero_hpz_partition_size": "2"}
    text |= {"reduce_scatter": "false", "offload_optimizer": {"device": "cpu", "ratio": "0.5"}}
    given = {"zero_optimization": text, "bf16": {"enabled": "yes"}, "gradient_clipping": "auto"}
    read = parsing.normalized(given)
    theirs = DeepSpeedZeroConfig(**text)
    for key, value in read["zero_optimization"].items():
        if key != "offload_optimizer":
            assert value == getattr(theirs, key) and type(value) is not str
    assert read["zero_optimization"]["offload_optimizer"]["ratio"] == theirs.offload_optimizer.ratio
    assert read["bf16"] == {"enabled": True} and "gradient_clipping" not in read
    assert text["stage"] == "3"  # what was given stays as it is
    for old in (True, False):
        zero = parsing.normalized({"zero_optimization": old})["zero_optimization"]
        assert zero["stage"] == get_zero_config({"zero_optimization": old}).stage == int(old)


def bucket_size(size):
    given = parsing.normalized(config("zero_optimization.reduce_bucket_size", size))
    return parsing.gradients(given).bucket_size


def test_an_error_of_deepspeed_without_words_is_named_by_its_type():
    with pytest.raises(ValueError, match="refuses the config: AssertionError$"):
        with deepspeed_config.translated():
            raise AssertionError


def test_bucket_size():
    assert parsing.gradients({"zero_optimization": {}}).bucket_size is None
    assert bucket_size(5e8) == 500_000_000 and isinstance(bucket_size(5e8), int)
    assert bucket_size(1) == 1
    for config, said in (
        ({}, "(the default of zero"),
        ({"zero_optimization": {"reduce_bucket_size": 9}}, "(zero"),
    ):
        line = parsing.log_lines(parsing.gradients(config), 9, config)[0]
        assert line.startswith(f"buckets of 9 gradient elements {said}")


def test_a_size_of_a_group_divides_the_ranks_or_holds_all_of_them():
    def told(size: int, ranks: int | None) -> list[str]:
        zero = {"stage": 3, "zero_hpz_partition_size": size}
        return list(config_checks.size_problems({"zero_optimization": zero}, ranks))

    assert not told(2, 4) and not told(8, 4) and not told(3, None)
    (line,) = told(3, 4)
    assert "zero_hpz_partition_size = 3 does not divide the 4 ranks" in line
    assert list(config_checks.size_problems({"sequence_parallel_size": 8}, 4))
