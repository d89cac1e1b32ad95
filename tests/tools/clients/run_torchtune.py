"""torchtune's recipe for one device, with the YAML of docs/guides/torchtune.md and a tiny Llama.

The YAML names the functions of this file that make tokenizer and data.
"""

import os
import re
import subprocess
from pathlib import Path

import tiny

CONFIG = """
output_dir: out
device: cpu
dtype: fp32
seed: 0
epochs: 1
batch_size: 8
max_steps_per_epoch: {steps}
gradient_accumulation_steps: 1
shuffle: true
resume_from_checkpoint: false
enable_activation_checkpointing: false
enable_activation_offloading: false
compile: false
log_every_n_steps: 1
log_peak_memory_stats: false
model:
  _component_: torchtune.models.llama2.llama2
  vocab_size: 258
  num_layers: 2
  num_heads: 4
  num_kv_heads: 4
  embed_dim: 64
  intermediate_dim: 128
  max_seq_len: 256
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: model
  checkpoint_files: [model.safetensors]
  output_dir: out
  model_type: LLAMA2
tokenizer:
  _component_: run_torchtune.tokenizer
dataset:
  _component_: run_torchtune.data
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
optimizer:
  _component_: ds_ext.AdaLomo
  lr: {rate}
optimizer_in_bwd: {fused}
clip_grad_norm: null
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: logs
"""


class Tokenizer:
    """What the recipe asks of a tokenizer."""

    pad_id = 0


def tokenizer() -> Tokenizer:
    return Tokenizer()


def data(tokenizer: Tokenizer) -> list[dict]:
    encode = tiny.tokenizer().encode
    rows = [encode(row["prompt"] + row["completion"]) for row in tiny.rows()]
    return [{"tokens": row, "labels": row} for row in rows]


def main() -> None:
    tiny.save("model")

    Path("ds_ext.yaml").write_text(CONFIG.format(steps=tiny.STEPS, rate=tiny.RATE, fused="true"))
    here = str(Path(__file__).parent)
    subprocess.run(
        ["tune", "run", "full_finetune_single_device", "--config", "ds_ext.yaml"],
        env={**os.environ, "PYTHONPATH": here},
        check=True,
    )
    log = next(Path("logs").glob("log_*.txt")).read_text()
    losses = [float(loss) for loss in re.findall(r"loss:([\d.]+)", log)]
    tiny.result(losses, ranks=1, stage="none")


if __name__ == "__main__":
    main()
