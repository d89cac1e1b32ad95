"""``python -m ds_ext plan``: the table read back, what is refused, and the picture."""

import builtins
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
import transformers

import ds_ext
from ds_ext import settings
from ds_ext.commands.cli import main
from ds_ext.config.optimizer_names import in_config
from ds_ext.ops import int8
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.planner import memory, models
from ds_ext.rules import REGISTRY
from tests.common import apart
from tests.common.apart import refused

SIZES = {"vocab_size": 3001, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=False)
SHAPES = memory.shapes_of(models.skeleton(CONFIG))
PARTS = ["weights", "state", "gradients", "master", "total"]


@pytest.fixture
def folder(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    return tmp_path


def read(text):
    """The heading of a printed table, and its rows: label -> {column: cell}."""
    heading, _, columns, *rest = text.splitlines()
    names = [name.strip() for name in columns.split("  ") if name.strip()]
    rows = {}
    for line in rest[: rest.index("")]:
        label, *cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        rows[label] = dict(zip(names, cells, strict=True))
    return heading, rows


def plan(capsys, *options):
    assert main(["plan", *map(str, options)]) == 0
    return read(capsys.readouterr().out)


def rules(name):
    """The rule of each parameter with its defaults: what one is not for, by the rule of others."""
    entry, own = REGISTRY[name], OPTIMIZERS[name].hypers()
    if not entry.roles:
        return own

    def of(role):
        keys = dict(entry.roles[role])
        kind = keys.pop("type", name).lower()
        return OPTIMIZERS[kind].hypers(**({"lr": own.lr} | keys))

    def role(key, shape):
        known = {"model.embed_tokens.weight": "embedding", "lm_head.weight": "head"}
        return known.get(key, "linear" if len(shape) == 2 else "other")

    roles = {key: role(key, shape) for key, shape in SHAPES.items()}
    return {key: own if is_ == "linear" else of(is_) for key, is_ in roles.items()}


def test_weights_that_zero3_keeps_whole_follow_the_configs_threshold(folder, capsys, tmp_path):
    options = ["--model", folder, "--ranks", 3, "--optimizer", "lomo", "--config"]
    key, whole = "stage3_param_persistence_threshold", 4 * memory.elements(SHAPES)
    config, found = tmp_path / "ds.json", []
    for threshold in (0, 10**9, "auto"):
        config.write_text(json.dumps({"zero_optimization": {"stage": 3, key: threshold}}))
        found.append(float(plan(capsys, *options, config)[1]["LOMO, ZeRO-3"]["weights"]))
    assert found[0] == pytest.approx(whole / 3 / 2**20, abs=0.0051)
    assert found[1] == pytest.approx(whole * 4 / 3 / 2**20, abs=0.0051)
    assert found[0] < found[2] <= found[1]


def test_what_is_offloaded_is_not_on_the_device(folder, capsys):
    options = ["--model", folder, "--ranks", 3, "--optimizer", "came", "--dtype", "fp32"]
    ours = ["--stage", 3, "--bucket", 100, "--offload-param", "--offload-optimizer"]
    _, rows = plan(capsys, *options, *ours)
    both = memory.optimizer_memory(
        OPTIMIZERS["came"].hypers(), SHAPES, 3, 3, torch.float32, 100, None, ("param", "optimizer")
    )
    row = rows["CAME, ZeRO-3, param and optimizer offloaded"]
    assert [row[part] for part in PARTS] == [f"{getattr(both, p) / 2**20:.2f}" for p in PARTS]
    _, without = plan(capsys, *options, "--stage", 3, "--bucket", 100)
    assert float(row["total"]) < float(without["CAME, ZeRO-3"]["total"])
    _, rows = plan(capsys, *options, "--offload-optimizer")
    assert [name for name in rows if name.startswith("CAME")] == [
        f"CAME, ZeRO-{stage}, optimizer offloaded" for stage in range(4)
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_table_is_the_arithmetic(name, folder, capsys):
    options = ["--model", folder, "--ranks", 3, "--optimizer", name.upper(), "--bucket", 100]
    heading, rows = plan(capsys, *options, "--dtype", "fp32")
    n = memory.elements(SHAPES)
    assert f"{n:,} parameters in fp32 on 3 data-parallel ranks; MiB per rank" in heading
    kind, rule = in_config(OPTIMIZERS[name].__name__), rules(name)
    expected = {}
    for stage in (None, *range(4)):
        how = "plain step()" if stage is None else f"ZeRO-{stage}"
        ours = memory.optimizer_memory(rule, SHAPES, stage, 3, torch.float32, 100)
        expected[f"{kind}, {how}"] = ours
    for stage in range(4):
        adamw = memory.adamw(SHAPES, stage, 3, torch.float32, 100)
        expected[f"AdamW, DeepSpeed ZeRO-{stage}"] = adamw
    assert rows.keys() == expected.keys()
    for label, row in rows.items():
        for part in PARTS:
            size = getattr(expected[label], part) / 2**20
            assert float(row[part]) == pytest.approx(size, abs=0.0051), (label, part)
        per_param = expected[label].total / n
        assert float(row["bytes/param"]) == pytest.approx(per_param, abs=0.0051)


def test_one_stage_and_the_cards_that_it_fits(capsys):
    options = ["--model", "Llama-3.1-8B", "--ranks", 8, "--stage", 2, "--memory", "12,24.5,80"]
    options += ["--optimizer", "adalomo"]
    heading, rows = plan(capsys, *options)
    assert "8,030,261,248 parameters in bf16" in heading and "GiB" in heading
    fits = {
        label: [row[f"in {card} GiB"] for card in ("12", "24.5", "80")]
        for label, row in rows.items()
    }
    assert fits == {
        "AdaLomo, ZeRO-2": ["no", "fits", "fits"],
        "AdamW, DeepSpeed ZeRO-2": ["no", "no", "fits"],
    }
    assert rows["AdaLomo, ZeRO-2"]["weights"] == "14.96"  # 2 · 8.030e9 / 2^30
    main(["plan", "--model", "Llama-3.1-8B", "--memory", "12"])
    assert "Nothing fits as it is." in capsys.readouterr().out


def test_all_optimizers_stand_beside_adamw(capsys):
    _, rows = plan(capsys, "--model", "llama-3.1-8b", "--ranks", 8)
    ours = [f"{in_config(optimizer.__name__)}, ZeRO-3" for optimizer in OPTIMIZERS.values()]
    assert list(rows) == [*ours, "AdamW, DeepSpeed ZeRO-3"]
    assert {"ds_ext.AdamW, ZeRO-3", "FlashAdamW, ZeRO-3"} < rows.keys()
    adamw = float(rows["AdamW, DeepSpeed ZeRO-3"]["total"])
    assert all(float(rows[label]["total"]) < adamw for label in ours)
    single = plan(capsys, "--model", "llama-3.1-8b", "--ranks", 8, "--optimizer", "galoreadamw")[1]
    assert single["GaLoreAdamW, ZeRO-3"] == rows["GaLoreAdamW, ZeRO-3"]


@pytest.mark.parametrize("stage", [2, 3])
def test_int8_is_refused_where_no_matrix_is_large_enough(stage, folder, capsys, monkeypatch):
    monkeypatch.setattr(int8, "MIN_NUMEL", 2**30)
    given = ["--model", folder, "--optimizer", "lomo", "--stage", stage]
    told = refused(capsys, "plan", *given, "--weight-storage", "int8", "--ranks", 7)
    assert "the model has no trainable matrix with at least 65,536 elements" in told
    assert ("ZeRO-3 needs that on each rank" in told) == (stage == 3)


def test_rules_by_name_are_planned(capsys):
    options = ["--model", "llama-3.1-8b", "--ranks", 8, "--stage", 3, "--optimizer", "lomo"]
    entry = '{"param_groups": [{"match": "mlp", "type": "LAMB"}]}'
    state = plan(capsys, *options, "--params", entry)[1]["LOMO, ZeRO-3"]["state"]
    n = 32 * 3 * 4096 * 14336
    assert float(state) == pytest.approx(8 * n / 8 / 2**30, abs=0.0051)


def test_other_models_than_language_models(tmp_path, capsys):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = transformers.ViTConfig(**sizes, num_attention_heads=4)
    config.save_pretrained(tmp_path)
    count = sum(p.numel() for p in transformers.ViTModel(config).parameters())
    assert f": {count:,} parameters" in plan(capsys, "--model", tmp_path)[0]


PLAN = "plan --model llama-3.1-8b "
WITHOUT_FIT = "--fit new.json --seq 8 --memory 8 "
# Wrong lines, and what is told of them.
REFUSED = [
    ("plan --model qwen-8b", "--model qwen-8b: no such folder or file, and no known model. Did"),
    (PLAN + "--batch 2", "--chunked-loss are for activations: add --seq TOKENS"),
    (PLAN + "--config nowhere.json", "--config nowhere.json: "),
    ("plan --model .", "--model .: no configuration of transformers"),
    ("plan", "--model is missing: give a folder"),
    (PLAN + "--optimizer adalom", "is 'adalom', which is not a ds_ext optimizer. Did you mean"),
    (PLAN + "--stage 4", "--stage: invalid choice: '4'"),
    (PLAN + "--pipeline-stages 2", "unknown option --pipeline-stages"),
    (PLAN + "--ranks 0", "--ranks: '0' is not a whole number > 0"),
    (PLAN + "--ranks two", "--ranks: 'two' is not a whole number > 0"),
    (PLAN + "--bucket -1", "--bucket: "),
    (PLAN + "--dtype fp8", "--dtype: invalid choice: 'fp8'"),
    (PLAN + "--memory 24,x", "--memory: '24,x' is not a list of GiB such as 24,48,80"),
    (PLAN + "--memory nan", "--memory: 'nan' is not a list"),
    (PLAN + "--params '{\"lr\": 1e-3}'", "--params must suit all of them: name one."),
    (PLAN + "--params {", "--params { is not JSON: "),
    (PLAN + "--params [1]", "--params [1] holds no JSON object"),
    (PLAN + "--optimizer lomo --params '{\"lrr\": 1}'", 'Did you mean "lr"?'),
    (PLAN + "--plot nowhere/x.png", "--plot nowhere/x.png: "),
    (PLAN + "--plot x.unknown", "--plot x.unknown: "),
    (PLAN + "--accumulate projected", "projected"),
    (PLAN + '--weight-storage int8 --params \'{"weight_update": "master"}\'', "= 'master' does"),
    (PLAN + "--offload-param --stage 2", "stage 3"),
    (PLAN + "--offload-optimizer --optimizer lamb --stage none", "another --stage"),
    (PLAN + "--fit new.json", "--fit: add --seq TOKENS, and --memory with one number"),
    (PLAN + "--fit new.json --seq 8 --memory 8,16", "--memory with one number"),
    (PLAN + WITHOUT_FIT + "--stage none", "--fit does not take --stage none: remove it"),
    (PLAN + WITHOUT_FIT + "--plot x.png", "--fit does not take --plot: remove it"),
    (PLAN + WITHOUT_FIT + "--config ds.json", "--fit does not take --config: remove it"),
    (PLAN + "--hf", "add --fit"),
    ("plan --modl llama-3.1-8b", 'unknown option --modl. Did you mean "--model"?'),
    (PLAN + "--optimzer=lomo", 'Did you mean "--optimizer"?'),
    ("check --modle x ds.json", 'unknown option --modle. Did you mean "--model"?'),
    ("config adalomo lomo", "unknown argument lomo."),
    ("config adalom", 'Did you mean "AdaLomo"?'),
    ("config", "OPTIMIZER"),
    ("config adan --import own_rulse", "--import own_rulse: No module named 'own_rulse'"),
    ("run", "TARGET is missing"),
    ("run -m", "TARGET is missing"),
    ("run none.py", "no such file, nor a command on PATH"),
    ("run --config ds.json train.py", "unknown option --config"),
]


@pytest.mark.parametrize("line, words", REFUSED)
def test_a_wrong_line_is_told_in_one_sentence(line, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text("{}")
    told = refused(capsys, *shlex.split(line))
    assert words in told and "usage:" not in told and "Traceback" not in told
    assert told.count("\n") == 1 and os.listdir() == ["ds.json"]


# That a config is checked: what it may have wrong is in test_check.py.
BAD_CONFIGS = [
    ({"train_micro_batch_size_per_gpu": "4"}, "train_micro_batch_size_per_gpu is '4'"),
    (dict.fromkeys(settings.SIZES, 1) | {"train_batch_size": 7}, "train_batch_size is not equal"),
    ({"optimizer": {"type": "CAME", "params": {"lrr": 1}}}, "unknown key optimizer.params.lrr"),
]


@pytest.mark.parametrize("config, words", BAD_CONFIGS, ids=str)
def test_a_wrong_value_of_a_config_is_told_by_its_key(config, words, folder, tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    told = refused(capsys, "plan", "--model", folder, "--ranks", 4, "--config", path)
    flags = set(re.findall("--[a-z-]+", told)) - {"--config", "--ranks", "--help", "--stage"}
    assert words in told and not flags and told.count("\n") == 1, told


@pytest.mark.parametrize(
    "package, extra, options",
    [("transformers", "hf", []), ("matplotlib", "plot", ["--plot", "x.png"])],
)
def test_a_missing_extra_is_named(package, extra, options, capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    told = refused(capsys, "plan", "--model", "llama-3.1-8b", *options)
    assert f"needs {package} (pip install ds-ext[{extra}])" in " ".join(told.split())


def test_the_picture_has_a_bar_for_every_part(tmp_path, capsys, monkeypatch):
    from matplotlib.axes import Axes

    drawn = {}
    barh = Axes.barh

    def recorded(self, labels, widths, **kwargs):
        drawn[kwargs["label"]] = (list(kwargs["left"]), list(widths))
        return barh(self, labels, widths, **kwargs)

    monkeypatch.setattr(Axes, "barh", recorded)
    picture = tmp_path / "plan.png"
    _, rows = plan(capsys, "--model", "llama-3.1-8b", "--ranks", 8, "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    ends = [0.0] * len(rows)
    for part in PARTS[:-1]:
        left, widths = drawn[part]
        assert left == pytest.approx(ends)  # stacked
        assert widths == pytest.approx([float(row[part]) for row in rows.values()], abs=0.0051)
        ends = [a + b for a, b in zip(left, widths, strict=True)]


@pytest.mark.slow
def test_as_a_command():
    given = ("--model", "smollm2-135m", "--ranks", 2, "--optimizer", "came")
    done = apart.python("-m", "ds_ext", "plan", *given)
    heading, rows = read(done.stdout)  # nothing else is on stdout
    assert heading.startswith("smollm2-135m: 134,515,008 parameters")
    assert "CAME, ZeRO-3" in rows
    said = apart.python("-m", "ds_ext").stdout
    assert "plan" in said and said.startswith("usage:")
    failed = apart.python("-m", "ds_ext", "plan", "--model", "nothing", fails=True)
    assert failed.returncode == 2


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ds_ext {ds_ext.__version__}\n"


@pytest.mark.slow
def test_a_reader_that_ends_early_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-u", "-m", "ds_ext", "config", "adalomo"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert ended.returncode == 1 and "BrokenPipe" not in ended.stderr, ended.stderr
