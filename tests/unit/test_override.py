"""``run --config``: the optimizer of a file replaces that of a program's own DeepSpeed config."""

import json

import pytest
import torch

from ds_ext.commands import run
from ds_ext.config import override

OWN = {
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95]}},
    "gradient_clipping": 1.0,
    "ds_ext": {"gradient_policy": "sharded"},
}


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Writes a file and names it as ``run --config`` does."""

    def write(config):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(config))
        monkeypatch.setenv(override.VARIABLE, str(path))
        override._read.cache_clear()

    return write


def test_optimizer_and_section_are_replaced_and_the_rest_stays(given):
    given(
        {
            "optimizer": {"type": "AdaLomo", "params": {"lr": "auto", "weight_decay": 0.1}},
            "ds_ext": {"bucket_size": 8},
            "gradient_clipping": 5.0,
        }
    )
    assert override.apply(OWN) == {
        "optimizer": {"type": "AdaLomo", "params": {"lr": 2e-5, "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "ds_ext": {"bucket_size": 8},
    }
    assert OWN["optimizer"]["type"] == "AdamW"  # the program's own dict is left alone


def test_params_of_null_are_those_of_neither(given):
    given({"optimizer": {"type": "LOMO", "params": None}})
    taken = override.apply({"optimizer": {"type": "AdamW", "params": None}})
    assert taken == {"optimizer": {"type": "LOMO", "params": {}}}


def test_a_file_without_the_section_leaves_the_programs(given):
    given({"optimizer": {"type": "LOMO"}})
    assert override.apply(OWN)["ds_ext"] == OWN["ds_ext"]


def test_what_does_not_train_is_left_alone(given, monkeypatch):
    given({"optimizer": {"type": "LOMO"}})
    inference = {"zero_optimization": {"stage": 3}}
    assert override.apply(inference) is inference
    monkeypatch.delenv(override.VARIABLE)
    assert override.apply(OWN) is OWN


def test_auto_without_a_value_of_the_program_is_an_error(given):
    given({"optimizer": {"type": "AdaLomo", "params": {"weight_decay": "auto"}}})
    with pytest.raises(ValueError, match="weight_decay is .auto., and the program sets no"):
        override.apply(OWN)


def test_an_optimizer_object_is_an_error(given):
    given({"optimizer": {"type": "AdaLomo"}})
    override.refuse_object(None)
    with pytest.raises(ValueError, match="passes SGD to deepspeed.initialize"):
        override.refuse_object(torch.optim.SGD([torch.zeros(1)], lr=1))


@pytest.mark.parametrize(
    "config, words",
    [
        ({"zero_optimization": {}}, "it has no optimizer.type"),
        ({"optimizer": None}, "optimizer is None; allowed"),
        ({"optimizer": {"type": "AdaLomo", "params": []}}, "optimizer.params is \\[\\]; allowed"),
        ({"optimizer": {"type": "AdaLmo"}}, "optimizer.type is 'AdaLmo'.*AdaLomo"),
    ],
)
def test_a_file_that_names_no_optimizer_is_refused_before_the_program_starts(
    config, words, tmp_path
):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        run.environment({}, str(path))
