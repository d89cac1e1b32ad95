"""LLaMA-Factory's command line: full SFT at stage 3, as in docs/guides/llama-factory.md.

LLaMA-Factory imports torchaudio even for text. Its wheels need CUDA, so an empty module is put in
its place.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import tiny

RANKS, STAGE = 2, 3
rows = [
    {"instruction": row["prompt"], "input": "", "output": row["completion"]} for row in tiny.rows()
]
settings = {
    "model_name_or_path": "model",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "deepspeed": "ds.json",
    "dataset_dir": "data",
    "dataset": "rows",
    "template": "empty",
    "cutoff_len": 64,
    "per_device_train_batch_size": 8,
    "learning_rate": tiny.RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "max_steps": tiny.STEPS,
    "bf16": False,
    "logging_steps": 1,
    "output_dir": "out",
    "save_strategy": "no",
    "report_to": "none",
}
tiny.save(Path("model"))
Path("data").mkdir()
Path("data/rows.json").write_text(json.dumps(rows))
Path("data/dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
Path("ds.json").write_text(json.dumps(tiny.config(STAGE)))
Path("mine.yaml").write_text(json.dumps(settings))  # JSON is YAML
Path("modules").mkdir()
Path("modules/torchaudio.py").touch()
command = [sys.executable, "-m", "ds_ext", "run", "llamafactory-cli", "train", "mine.yaml"]
ranks = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(RANKS)}
ranks["PYTHONPATH"] = os.pathsep.join(
    [str(Path("modules").resolve()), *filter(None, [os.getenv("PYTHONPATH")])]
)
subprocess.run(command, check=True, env={**os.environ, **ranks})
tiny.result(tiny.saved(Path("out")), RANKS, STAGE)
