"""The examples run as their first lines say, in short form, and learn something; so do the code and
the commands of docs/guides, on two CPU ranks. What the demo tells of its progress."""

import ast
import contextlib
import io
import json
import os
import re
import runpy
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn

from ds_ext.commands import config
from tests import worlds
from tests.common import apart
from tests.common.choose import params
from tests.worlds import ROOT, free_port

EXAMPLES = worlds.ROOT / "examples"


def run(name: str, folder: str, *options: str) -> str:
    """What ``python examples/NAME`` prints, run in this process from the folder ``folder``.

    The process group outlives it, for the next job; that an example destroys it is asserted.
    """
    argv = [str(EXAMPLES / name), "--out", f"{folder}/out", *options]
    printed = io.StringIO()
    os.chdir(folder)
    ended = mock.Mock()
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        _imported_anew(),
        mock.patch.object(dist, "destroy_process_group", ended),
        contextlib.redirect_stdout(printed),
        torch.random.fork_rng(devices=[]),
    ):
        runpy.run_path(argv[0], run_name="__main__")
    ended.assert_called_once_with()
    return printed.getvalue()


@contextlib.contextmanager
def _imported_anew() -> Iterator[None]:
    """Forgets what an example imports from its folder, such as tiny.py, when it ends."""
    yield
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and EXAMPLES in Path(file).parents:
            del sys.modules[name]


def first_life(name: str, folder: str, *options: str) -> str:
    """The same as torchrun starts it for the first time."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    return run(name, folder, *options)


STEPS = 6


def make_model(folder: Path) -> None:
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        runpy.run_path(str(EXAMPLES / "tiny.py"))["make"](folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples") / "tiny-llama"
    make_model(folder)
    return folder


def losses(printed):
    return [float(found) for found in re.findall(r"loss'?:? '?(-?[\d.]+)", printed)]


def options(model, steps=STEPS):
    return ["--model", str(model), "--steps", str(steps)]


LOOPS = {"plain_pytorch.py": "config.json", "fsdp2.py": ".metadata"}
LOOPS["pipeline.py"] = f"global_step{STEPS}/layer_05-model_states.pt"


@pytest.mark.parametrize("name", params(LOOPS, ["plain_pytorch.py"]))
def test_a_loop(name, model, tmp_path):
    ranks = worlds.run(2, run, name, str(tmp_path), *options(model))
    found, of_other = (re.findall(r"step \d+: loss ([\d.]+)", printed) for printed in ranks)
    assert len(found) == STEPS and float(found[-1]) < float(found[0]) - 0.1 and not of_other
    assert (tmp_path / "out" / LOOPS[name]).is_file()


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_the_weights_of_a_whole_one(model, tmp_path):
    job, name = run, "resume_after_kill.py"
    given = [*options(model, 18), "--save-every", "10"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir(), whole.mkdir()
    first, last = worlds.fresh(2, first_life, name, str(killed), *given)
    assert last.code == -signal.SIGKILL and first.code != 0
    printed = worlds.run(2, job, name, str(killed), *given)[0]
    assert re.findall(r"step (\d+)", printed) == [str(i) for i in range(10, 18)]
    printed = worlds.run(2, job, "train_loop.py", str(whole), *given)[0]
    assert re.findall(r"step (\d+)", printed) == [str(i) for i in range(18)]
    found, expected = (
        torch.load(folder / "out" / "pytorch_model.bin") for folder in (killed, whole)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trl_sft.py", "trl_grpo.py", "trl_fsdp2.py"])
def test_trl(name, model, tmp_path):
    pytest.importorskip("trl", reason="TRL, which needs Python 3.11, is not installed")
    printed = worlds.run(2, run, name, str(tmp_path), *options(model, 5))[0]
    assert len(losses(printed)) == 2  # of five steps, and their mean at the end
    assert "reward" in printed or losses(printed)[0] < 7.6
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_lightning_that_is_missing_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with pytest.raises(SystemExit, match="pip install lightning"):
        runpy.run_path(str(EXAMPLES / "lightning_trainer.py"))


def test_what_llama_factorys_yaml_names_is_there():
    given = yaml.safe_load((EXAMPLES / "llama_factory.yaml").read_text())
    assert json.loads((ROOT / given["deepspeed"]).read_text())["optimizer"]["type"] == "AdaLomo"
    known = json.loads((ROOT / given["dataset_dir"] / "dataset_info.json").read_text())
    entry = known[given["dataset"]]
    row = json.loads((ROOT / given["dataset_dir"] / entry["file_name"]).open().readline())
    assert set(entry["columns"].values()) <= row.keys()


MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
model, losses = LlamaForCausalLM(LlamaConfig(**size, **heads)), []
model.register_forward_hook(lambda module, inputs, output: losses.append(output.loss.item()))
data = [{"input_ids": x, "labels": x} for x in torch.randint(0, 8, (128, 12))]
loader = torch.utils.data.DataLoader(data, batch_size=2)
"""
END = '\nprint(f"losses {losses}", flush=True)\n'


def blocks(guide, language=""):
    text = (ROOT / "docs/guides" / f"{guide}.md").read_text()
    found = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", text)
    return [code for kind, code in found if kind == language]


def falls(script, command, folder):
    (folder / "script.py").write_text(script)
    made = config.make("adalomo", 3) | {"gradient_clipping": 0.0}
    (folder / "ds.json").write_text(json.dumps(made))
    port = free_port()
    program, *rest = shlex.split(command)
    starts = {
        "torchrun": ["torch.distributed.run", "--master_port", port],
        "accelerate": ["accelerate.commands.accelerate_cli", "launch", "--main_process_port", port],
    }
    rest = rest[1:] if program == "accelerate" else rest
    done = apart.python("-m", *starts[program], *rest, cwd=folder, timeout=300)
    found = re.findall(r"losses (\[[^\]]*\])", done.stdout)
    assert len(found) == 2
    for losses in map(ast.literal_eval, found):
        assert len(losses) >= 32 and sum(losses[-4:]) < 0.9 * sum(losses[:4])


class Layers(nn.Module):
    """Two layers, which ``batch_splits`` finds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))
        self.head = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(sum(layer(x).tanh() for layer in self.layers))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_accelerate(launcher, tmp_path):
    loop, cpu = blocks("accelerate", "python")
    (commands,) = blocks("accelerate")
    (command,) = (line for line in commands.splitlines() if line.startswith(launcher))
    falls(cpu + MODEL + loop.replace("1e-3", "1e-2") + END, command, tmp_path)


@pytest.mark.slow
def test_hf_trainer(tmp_path):
    arguments, _ = blocks("hf-trainer", "python")
    arguments = arguments.replace("1e-3", "1e-2").replace("bf16=True", "use_cpu=True, bf16=False")
    run = "Trainer(model=model, args=args, train_dataset=data).train()"
    batch = "args.per_device_train_batch_size = 2"
    script = "\n".join([arguments, MODEL, batch, run, END])
    falls(script, "torchrun --nproc_per_node 2 script.py", tmp_path)


PAGE = ROOT / "docs/guides/recipes.md"
SECTIONS = dict(re.findall(r"(?ms)^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE.read_text()))


@pytest.mark.parametrize("section", SECTIONS)
@worlds.on(2)
def test_a_config_of_the_recipes_trains(section):
    (config,) = re.findall(r"(?ms)^```json\n(.*?)^```$", SECTIONS[section])
    calls = "".join(re.findall(r"(?ms)^```python\n(.*?)^```$", SECTIONS[section]))
    torch.manual_seed(0)
    engine = deepspeed.initialize(model=Layers(), config=json.loads(config))[0]
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(8, 16, generator=generator).bfloat16()
    losses = []
    for _ in range(3):
        for _ in range(engine.gradient_accumulation_steps()):
            loss = (engine(x).float() - x).square().mean()
            engine.backward(loss)
            engine.step()
        losses.append(float(loss))
        if "offload_states" in calls:
            engine.offload_states()
            engine.reload_states()
    with engine.optimizer.ema() if "ema()" in calls else contextlib.nullcontext():
        losses.append(float((engine(x).float() - x).square().mean()))
    assert all(a != b for a, b in zip(losses, losses[1:], strict=False)), losses
    assert losses[2] < losses[0]


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import finetune
    import progress

    return finetune, progress


def test_the_time_left_is_told_after_two_steps_and_leaves_out_the_first(demo):
    _, progress = demo
    assert progress.remaining([90.0], [80.0], 40, 5) is None
    # 38 steps of 4 s; evaluations at 5, 10, ..., 40 of 6 s each
    assert progress.remaining([90.0, 4.0], [80.0, 6.0], 40, 5) == 38 * 4 + 8 * 6
    # the last step is evaluated though it is no multiple; one evaluation alone counts
    assert progress.remaining([9.0, 1.0, 3.0], [7.0], 6, 5) == 3 * 2 + 2 * 7
    assert progress.remaining([9.0, 1.0], [7.0], 2, 5) == 0


@pytest.mark.parametrize(
    "there, most, rows", [(94, 16, 16), (10, 16, 10), (94, 0, 94), (17, 16, 16)]
)
def test_the_held_out_rows_are_spread_over_all(demo, there, most, rows):
    import datasets

    data = datasets.Dataset.from_dict({"row": list(range(there))})
    got = demo[0].spread(data, most)["row"]
    assert len(got) == rows and got == sorted(got) and got[-1] >= there * 0.7
