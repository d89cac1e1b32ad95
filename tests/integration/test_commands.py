"""``python -m ds_ext`` run and config: programs of others, and configs; plugins of others."""

import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
from torch import nn

from ds_ext.commands import config as configs
from ds_ext.commands import run
from ds_ext.commands.cli import main
from ds_ext.config import optimizer_names
from ds_ext.optimizer import OPTIMIZERS
from tests.common import adan
from tests.common.apart import refused
from tests.common.choose import params

ROOT = Path(__file__).parents[2]


def started(*command, **own):
    """What a command that runs here has given; ``own`` goes into its environment."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"} | own
    return subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=120
    )


def became(monkeypatch, *arguments):
    """The program, and the environment, that ``python -m ds_ext ARGUMENTS`` becomes."""
    found = []
    monkeypatch.setattr(os, "execve", lambda path, command, env: found.append((command, env)))
    assert main([*map(str, arguments)]) == 0
    ((command, env),) = found
    return command, env


# It tells all that may differ when another program has started it, and fails; with --x it does
# not, since torchrun ends the other ranks where one fails.
PROGRAM = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv[1:], "name": __name__, "file": __file__, "path": sys.path,
    "flags": [str(sys.flags), sys.warnoptions],
    "modules": [m for m in ("torch", "ds_ext") if m in sys.modules],
    "registered": [type(f).__name__ for f in sys.meta_path].count("_WhenImported"),
}))
def fail(): raise KeyError("its own")
fail() if "fail" in sys.argv else sys.exit(0 if "--x" in sys.argv else 7)
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = tmp_path / "command"
    command.write_text(f"#!{sys.executable}\n{PROGRAM}")
    command.chmod(0o755)
    return tmp_path


FORMS = {"script": ["program.py"], "module": ["-m", "program"], "command": ["command"]}


@pytest.mark.parametrize("form", params(FORMS, ["module"]))
def test_a_program_runs_as_without(form, program):
    """Its arguments, name, paths, flags, traceback and exit code; Python's own options too."""
    target = FORMS[form] if form == "module" else [program / FORMS[form][0]]
    own = {"PYTHONPATH": f"{ROOT}{os.pathsep}{program}"}
    ends = ((["-m", "a b", "--", "--x=1"], 7), (["fail"], 1))
    for arguments, code in ends[: 1 if form == "module" else 2]:
        python = [] if form == "command" else [sys.executable, "-W", "error::SyntaxWarning"]
        plain = started(*python, *target, *arguments, **own)
        with_us = started(
            sys.executable, *python[1:], *("-m", "ds_ext", "run"), *target, *arguments, **own
        )
        assert with_us.returncode == plain.returncode == code
        assert with_us.stderr == plain.stderr
        told, expected = json.loads(with_us.stdout), json.loads(plain.stdout)
        assert (told.pop("registered"), expected.pop("registered")) == (1, 0)
        assert told == expected
        assert told["modules"] == []  # neither is imported before the program asks for it


KNOWS = "import deepspeed; print(hasattr(deepspeed.DeepSpeedEngine.__init__, '__wrapped__'))"


@pytest.mark.slow
def test_what_a_program_starts_knows_the_optimizers(tmp_path):
    """A child of a child, which imports DeepSpeed and not ds_ext; sitecustomize is not hidden."""
    (tmp_path / "sitecustomize.py").write_text("print('its own sitecustomize')")
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {KNOWS!r}], check=True)"
    own = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "PYTHONUNBUFFERED": "1"}
    (tmp_path / "own_rules.py").write_text("print('its own rules')")
    command = [sys.executable, "-m", "ds_ext", "run", "--import", "own_rules", sys.executable]
    done = started(*command, "-c", child, **own)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    # The process itself, the program that it becomes, and its child.
    assert lines.count("its own sitecustomize") == 3 and lines[-1] == "True"
    assert lines.count("its own rules") == 2  # the command, and the child that imports DeepSpeed


@pytest.mark.slow
def test_launchers_run_programs(program):
    """torchrun and DeepSpeed's launcher, which puts --local_rank first."""
    both = started(
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2, "-m"),
        *("ds_ext", "run", program / "program.py", "--x"),
    )
    assert both.returncode == 0, both.stderr
    # Two ranks may write to one line.
    told = [json.loads(found) for found in re.findall(r"\{[^{}]*\}", both.stdout)]
    assert [(one["argv"], one["registered"]) for one in told] == [(["--x"], 1)] * 2
    launched = started(
        *(sys.executable, "-m", "deepspeed.launcher.launch", "--module", "--world_info"),
        *("eyJsb2NhbGhvc3QiOiBbMF19", "--master_port", "29677"),  # {"localhost": [0]}
        *("ds_ext", "run", program / "program.py", "--x"),
    )
    (line,) = (line for line in launched.stdout.splitlines() if line.startswith("{"))
    assert json.loads(line)["argv"] == ["--local_rank=0", "--x"]
    assert json.loads(line)["registered"] == 1


def test_what_a_launcher_puts_first_goes_to_the_program(monkeypatch, program):
    python = [sys.executable, *run._flags(sys.orig_argv)]
    command, _ = became(monkeypatch, "--local_rank=3", "run", "-m", "trainer", "--local_rank=x")
    assert command == [*python, "-m", "trainer", "--local_rank=3", "--local_rank=x"]
    command, env = became(monkeypatch, "run", program / "program.py", "-m", "--version", "--", "-h")
    assert command == [*python, str(program / "program.py"), "-m", "--version", "--", "-h"]
    changed = {k for k in env if env[k] != os.environ.get(k)}
    assert changed == {"PYTHONPATH"} and env.keys() >= os.environ.keys()
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(run.CHILDREN)


def test_options_of_python_are_passed_on():
    argv = ["python", "-u", "-X", "dev", "-W", "error", "-m", "ds_ext", "run", "-m", "x"]
    assert run._flags(argv) == ["-u", "-X", "dev", "-W", "error"]
    assert run._flags(["pytest", "tests"]) == []


def test_an_interpreter_that_ignores_the_path_is_refused(monkeypatch, capsys):
    without = types.SimpleNamespace(flags=types.SimpleNamespace(ignore_environment=True))
    monkeypatch.setattr(run, "sys", without)
    assert "keep PYTHONPATH" in refused(capsys, "run", "x.py")


def test_axolotl_has_a_plugin_to_name(monkeypatch):
    """With its base class, whose interface axolotl 0.19 has, in its place: it is not installed."""
    base = types.ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {})
    for module in (types.ModuleType("axolotl"), types.ModuleType("axolotl.integrations"), base):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "ds_ext.axolotl", raising=False)
    from ds_ext.axolotl import Plugin

    assert isinstance(Plugin(), base.BasePlugin)
    Plugin().register({"deepspeed": "ds.json"})
    with pytest.raises(ValueError, match="deepspeed: ds.json"):
        Plugin().register({"optimizer": "adamw_torch"})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_configs_are_those_of_the_folder(name, capsys):
    for folder, options in (("configs", []), ("configs/plain", ["--numbers"])):
        assert main(["config", name.upper(), *options]) == 0
        assert capsys.readouterr().out == (ROOT / f"{folder}/{name}_zero3.json").read_text()


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("numbers", [False, True])
def test_every_config_is_accepted_and_names_our_optimizer(stage, numbers, tmp_path, capsys):
    for name in OPTIMIZERS:
        made = configs.make(name, stage, numbers)
        assert optimizer_names.registry_key(made["optimizer"]["type"]) == name
        assert made["zero_optimization"]["stage"] == stage
        text = json.dumps(made)
        assert ("auto" in text) is not numbers
        (tmp_path / "ds.json").write_text(text)
        assert main(["check", str(tmp_path / "ds.json"), "--ranks", "2"]) == 0, name
    assert "nothing is wrong" in capsys.readouterr().out


def test_optimizers_of_the_user_are_imported(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    source = inspect.getsource(adan) + "\nenter()\n"
    (tmp_path / "own_rules.py").write_text(source)
    optimizer = {"type": "Adan", "params": {"lr": 1}}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    try:
        for command in (
            ["config", "adan", "--numbers"],
            ["plan", "--model", "qwen3-0.6b", "--optimizer", "adan"],
            ["check", str(tmp_path / "ds.json")],
        ):
            main([*command, "--import", "own_rules"])
            printed = capsys.readouterr().out
            assert "Adan" in printed or "nothing is wrong" in printed
            adan.leave()
            del sys.modules["own_rules"]
    finally:
        sys.modules.pop("own_rules", None)


# The plugin for ms-swift, imported by its path as ms-swift does, beside a stand-in for ms-swift.
def test_every_optimizer_is_made_by_the_plugin_for_ms_swift(monkeypatch):
    class OptimizerCallback:
        def __init__(self, args, trainer):
            self.args, self.trainer = args, trainer

    swift = types.ModuleType("swift.optimizers")
    swift.OptimizerCallback, swift.optimizers_map = OptimizerCallback, {}
    monkeypatch.setitem(sys.modules, "swift", types.ModuleType("swift"))
    monkeypatch.setitem(sys.modules, "swift.optimizers", swift)
    runpy.run_path(str(Path(__file__).parents[2] / "examples/ms_swift.py"))
    assert swift.optimizers_map.keys() == OPTIMIZERS.keys()
    model = nn.Linear(8, 8)
    model.bias.requires_grad_(False)
    for name, kind in OPTIMIZERS.items():
        args = types.SimpleNamespace(optimizer=name, learning_rate=0.02, weight_decay=0.1)
        optimizer = swift.optimizers_map[name](args, types.SimpleNamespace(model=model))
        made = optimizer.create_optimizer()
        assert type(made) is kind and made.params() == [model.weight]
        assert (made.defaults["lr"], made.defaults["weight_decay"]) == (0.02, 0.1)
