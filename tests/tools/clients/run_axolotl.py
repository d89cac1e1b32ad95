"""axolotl's command line: full SFT at stage 3 by the plugin of docs/guides/axolotl.md.

axolotl asks CUDA whether two devices see each other. A CUDA build of torch raises an error there on
a machine without a driver, so ``cpu.py`` answers the question itself.
"""

import json
import os
import subprocess
from pathlib import Path

import tiny

RANKS, STAGE = 1, 3  # it resets what accelerate was told of several CPU ranks
CPU = """import accelerate, runpy, torch

if __name__ == "__main__":
    torch.cuda.can_device_access_peer = lambda *devices: False
    accelerate.PartialState(cpu=True)
    runpy.run_module("axolotl.cli.train", run_name="__main__")
"""
rows = [
    {"instruction": row["prompt"], "input": "", "output": row["completion"]} for row in tiny.rows()
]
settings = {
    "plugins": ["ds_ext.axolotl.Plugin"],
    "base_model": "model",
    "deepspeed": "ds.json",
    "datasets": [{"path": "rows.json", "ds_type": "json", "type": "alpaca"}],
    "dataset_prepared_path": "prepared",
    "dataset_num_proc": 1,
    "sequence_len": 256,
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": tiny.RATE,
    "lr_scheduler": "constant",
    "warmup_steps": 0,
    "max_grad_norm": 0.0,
    "max_steps": tiny.STEPS,
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "flash_attention": False,
    "logging_steps": 1,
    "output_dir": "out",
    "special_tokens": {"pad_token": "<pad>"},
}
tiny.save(Path("model"))
Path("rows.json").write_text(json.dumps(rows))
Path("ds.json").write_text(json.dumps(tiny.config(STAGE)))
Path("mine.yaml").write_text(json.dumps(settings))  # JSON is YAML
Path("cpu.py").write_text(CPU)
command = ["torchrun", "--nproc_per_node", str(RANKS), "cpu.py", "mine.yaml"]
subprocess.run(command, check=True, env={**os.environ, "AXOLOTL_DO_NOT_TRACK": "1"})
tiny.result(tiny.saved(Path("out")), RANKS, STAGE)
