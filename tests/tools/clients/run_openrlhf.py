"""OpenRLHF's SFT on the CPU, as in docs/guides/openrlhf.md.

    run_openrlhf.py            starts two ranks of this file by ``python -m ds_ext run --config``
    run_openrlhf.py ARGUMENTS  is one of them: OpenRLHF's program with these arguments

OpenRLHF asks for CUDA devices and flash-attn, even where it needs none of them. Each rank replaces
those calls before it imports OpenRLHF; its trainer and its DeepSpeed config are as released.
"""

import importlib
import importlib.machinery
import json
import runpy
import subprocess
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist

RANKS, STAGE = 2, 3
ARGUMENTS = {
    "model.model_name_or_path": "model",
    "data.dataset": "rows.jsonl",
    "data.input_key": "prompt",
    "data.output_key": "completion",
    "data.max_len": 64,
    "data.dataloader_num_workers": 0,
    "ds.zero_stage": STAGE,
    "ds.attn_implementation": "eager",
    "train.micro_batch_size": 8,
    "train.batch_size": 8 * RANKS,
    "train.max_epochs": 1,
    "adam.lr": 1e-2,
    "lr_scheduler": "constant",
    "max_norm": 0,
    "ckpt.output_dir": "out",
}


def launch() -> None:
    """Writes model, data and config, trains, and prints the result."""
    import tiny

    tiny.save(Path("model"))
    rows = "".join(json.dumps(row) + "\n" for row in tiny.rows(8 * RANKS * tiny.STEPS))
    Path("rows.jsonl").write_text(rows)
    Path("ds.json").write_text(json.dumps(tiny.config(STAGE)))
    command = ["torchrun", "--nproc_per_node", str(RANKS), "-m", "ds_ext", "run"]
    command += ["--config", "ds.json", __file__]
    for name, value in ARGUMENTS.items():
        command += [f"--{name}", str(value)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(ran.stdout)
    ran.check_returncode()
    assert "AdaLomo replaces AdamW" in ran.stdout
    losses = json.loads(Path("losses.json").read_text())
    tiny.result(losses, RANKS, STAGE)


def flash_attn() -> None:
    """Makes modules of the names that OpenRLHF imports from flash-attn, without contents."""
    names = {
        "flash_attn": (),
        "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
        "flash_attn.utils": (),
        "flash_attn.utils.distributed": ("all_gather",),
    }
    for name, contents in names.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        for content in contents:
            setattr(module, content, None)
        sys.modules[name] = module


def rank() -> None:
    """Runs OpenRLHF's program with the CPU in the place of CUDA; rank 0 writes the losses."""
    flash_attn()
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    mesh = importlib.import_module("torch.distributed.device_mesh")
    make = mesh.init_device_mesh
    mesh.init_device_mesh = lambda device, *shape, **names: make("cpu", *shape, **names)

    from openrlhf.trainer.sft_trainer import SFTTrainer

    losses, log = [], SFTTrainer.save_logs_and_checkpoints

    def logs(self, args, step, bar, values=None, states=None):
        losses.append(values["gpt_loss"])
        log(self, args, step, bar, values, states)

    SFTTrainer.save_logs_and_checkpoints = logs
    runpy.run_module("openrlhf.cli.train_sft", run_name="__main__", alter_sys=True)
    if dist.get_rank() == 0:
        Path("losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    rank() if sys.argv[1:] else launch()
