"""docs/guides: the code and the commands of a guide run on two CPU ranks, and the model learns."""

import ast
import contextlib
import json
import re
import shlex
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_ext.commands import config
from tests import worlds
from tests.common import apart
from tests.worlds import ROOT, free_port

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
END = """
print(f"losses {losses}", flush=True)
"""


def blocks(guide, language=""):
    text = (ROOT / "docs/guides" / f"{guide}.md").read_text()
    found = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", text)
    return [code for kind, code in found if kind == language]


def falls(script, command, folder):
    """Runs a script, and sees the loss of each rank fall."""
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


STEPS = 3


def train_recipe(config: dict[str, Any], calls: str) -> list[float]:
    """The losses of some steps on one batch, with the section's ``calls`` between them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    engine = deepspeed.initialize(model=model, config=config)[0]
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(8, 16, generator=generator).bfloat16()
    losses = []
    for _ in range(STEPS):
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
    return losses


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
def test_a_config_of_the_recipes_trains(section):
    (config,) = re.findall(r"(?ms)^```json\n(.*?)^```$", SECTIONS[section])
    calls = "".join(re.findall(r"(?ms)^```python\n(.*?)^```$", SECTIONS[section]))
    for losses in worlds.run(2, train_recipe, json.loads(config), calls):
        assert all(a != b for a, b in zip(losses, losses[1:], strict=False)), losses
        assert losses[2] < losses[0]
