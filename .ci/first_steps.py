"""Runs the README's example in plain PyTorch, and commands, with the package that is installed.

PYTHON .ci/first_steps.py
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

import ds_ext

ROOT = Path(__file__).resolve().parents[1]


class Model(torch.nn.Module):
    """Takes batches and returns losses as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        """Returns an object with the loss."""
        return SimpleNamespace(loss=(self.layer(x) - x).square().mean())


assert Path(ds_ext.__file__).parent != ROOT / "ds_ext", "ds_ext of the source, not of the wheel"
torch.manual_seed(0)
model, data = Model(), [{"x": torch.randn(4, 8)} for _ in range(200)]
before = model(**data[0]).loss.item()
blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", (ROOT / "README.md").read_text())
(example,) = [block for block in blocks if "fuse_into_backward" in block]
names = {"ds_ext": ds_ext, "model": model}
exec(example, names)
for batch in data:
    model(**batch).loss.backward()
    names["optimizer"].step()
after = model(**data[0]).loss.item()
print(f"README's example: loss {before:.3f} -> {after:.3f}")
assert after < 0.95 * before

run = [sys.executable, "-m", "ds_ext"]
with tempfile.TemporaryDirectory() as folder:
    config = subprocess.check_output([*run, "config", "adalomo"], text=True, cwd=folder)
    Path(folder, "ds.json").write_text(config)
    subprocess.run([*run, "check", "ds.json"], cwd=folder, check=True)
    subprocess.run([*run, "--version"], cwd=folder, check=True)
