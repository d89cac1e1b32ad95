"""Full SFT by a program's own command line, as in its guide: axolotl, llamafactory or swift.

axolotl asks CUDA whether two devices see each other, which raises an error in a CUDA build of torch
without a driver: ``cpu.py`` answers instead. It resets what accelerate was told of several CPU
ranks. LLaMA-Factory imports torchaudio even for text, whose wheels need CUDA: here it is empty.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import tiny

CPU = """import accelerate, runpy, torch

if __name__ == "__main__":
    torch.cuda.can_device_access_peer = lambda *devices: False
    accelerate.PartialState(cpu=True)
    runpy.run_module("axolotl.cli.train", run_name="__main__")
"""
USUAL = {"learning_rate": tiny.RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
USUAL |= {"max_steps": tiny.STEPS, "logging_steps": 1, "output_dir": "out"}
MINE = {"deepspeed": "ds.json", "bf16": False}
TOLD = {"output": "completion", "instruction": "prompt"}
ROWS = [{"input": ""} | {key: row[own] for key, own in TOLD.items()} for row in tiny.rows()]


def axolotl() -> tuple[list[str], dict[str, str], int, int]:
    """Its command, environment, ranks and stage."""
    settings = USUAL | MINE | {"plugins": ["ds_ext.axolotl.Plugin"], "base_model": "model"}
    settings["lr_scheduler"] = settings.pop("lr_scheduler_type")
    settings["datasets"] = [{"path": "rows.json", "ds_type": "json", "type": "alpaca"}]
    settings |= {"dataset_prepared_path": "prepared", "dataset_num_proc": 1, "sequence_len": 256}
    settings |= {"micro_batch_size": 8, "gradient_accumulation_steps": 1, "warmup_steps": 0}
    settings |= {"fp16": False, "tf32": False, "flash_attention": False}
    settings["special_tokens"] = {"pad_token": "<pad>"}
    Path("rows.json").write_text(json.dumps(ROWS))
    Path("mine.yaml").write_text(json.dumps(settings))  # JSON is YAML
    Path("cpu.py").write_text(CPU)
    command = ["torchrun", "--nproc_per_node", "1", "cpu.py", "mine.yaml"]
    return command, {"AXOLOTL_DO_NOT_TRACK": "1"}, 1, 3


def llamafactory() -> tuple[list[str], dict[str, str], int, int]:
    settings = USUAL | MINE | {"model_name_or_path": "model", "stage": "sft", "do_train": True}
    settings |= {"finetuning_type": "full", "dataset_dir": "data", "dataset": "rows"}
    settings |= {"template": "empty", "cutoff_len": 64, "per_device_train_batch_size": 8}
    settings |= {"save_strategy": "no", "report_to": "none"}
    for folder in ("data", "modules"):
        Path(folder).mkdir()
    Path("data/rows.json").write_text(json.dumps(ROWS))
    Path("data/dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    Path("mine.yaml").write_text(json.dumps(settings))
    Path("modules/torchaudio.py").touch()
    path = [str(Path("modules").resolve()), *filter(None, [os.getenv("PYTHONPATH")])]
    ranks = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "ds_ext", "run", "llamafactory-cli", "train", "mine.yaml"]
    return command, ranks, 2, 3


def swift() -> tuple[list[str], dict[str, str], int, int]:
    settings = USUAL | {"max_grad_norm": 0, "model": "model", "model_type": "llama"}
    settings |= {"template": "dummy", "dataset": "rows.jsonl", "optimizer": "adalomo"}
    settings |= {"external_plugins": Path(__file__).parents[3] / "examples/ms_swift.py"}
    settings |= {"deepspeed": "zero2", "tuner_type": "full", "torch_dtype": "float32"}
    settings |= {"max_length": 64, "per_device_train_batch_size": 8, "warmup_ratio": 0}
    settings |= {"gradient_accumulation_steps": 1, "split_dataset_ratio": 0, "report_to": "none"}
    names = {"user": "prompt", "assistant": "completion"}
    rows = [[{"role": r, "content": row[key]} for r, key in names.items()] for row in tiny.rows()]
    Path("rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    command = ["swift", "sft"]
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    return command, {"NPROC_PER_NODE": "2", "ACCELERATE_USE_CPU": "true"}, 2, 2


tiny.save(Path("model"))
command, own, ranks, stage = {"axolotl": axolotl, "swift": swift}.get(sys.argv[1], llamafactory)()
Path("ds.json").write_text(json.dumps(tiny.config(stage)))
subprocess.run(command, check=True, env={**os.environ, **own})
tiny.result(tiny.saved(Path("out")), ranks, stage)
