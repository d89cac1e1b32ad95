"""ms-swift's command line: full SFT at stage 2 by the plugin of docs/guides/ms-swift.md."""

import json
import os
import subprocess
from pathlib import Path

import tiny

import ds_ext

RANKS, STAGE = 2, 2
rows = [
    {
        "messages": [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
    }
    for row in tiny.rows()
]
settings = {
    "model": "model",
    "model_type": "llama",
    "template": "dummy",
    "dataset": "rows.jsonl",
    "external_plugins": Path(ds_ext.__file__).parent / "ms_swift.py",
    "optimizer": "adalomo",
    "deepspeed": f"zero{STAGE}",
    "tuner_type": "full",
    "torch_dtype": "float32",
    "max_length": 64,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": tiny.RATE,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0,
    "max_grad_norm": 0,
    "max_steps": tiny.STEPS,
    "logging_steps": 1,
    "split_dataset_ratio": 0,
    "output_dir": "out",
    "report_to": "none",
}
tiny.save(Path("model"))
Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
command = ["swift", "sft"]
for name, value in settings.items():
    command += [f"--{name}", str(value)]
ranks = {"NPROC_PER_NODE": str(RANKS), "ACCELERATE_USE_CPU": "true"}
subprocess.run(command, check=True, env={**os.environ, **ranks})
tiny.result(tiny.saved(Path("out")), RANKS, STAGE)
