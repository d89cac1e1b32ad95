"""Memory of fine-tuning a model of 7B: random bf16 weights, activation checkpointing.

"active" is the peak of memory that a tensor or a
stream still uses. It includes tensors that were freed while another stream may read them, which
``max_memory_allocated`` leaves out. "reserved" is what torch took from the GPU.
"""

import math

import torch

from benchmarks.gpu.setting import RIGHT, WRONG, Row, Rows, Setting
from benchmarks.gpu.training_speed import checkpointed
from benchmarks.memory import ADAMW, fine_tuning

OPTIMIZERS = ("LOMO", "AdaLomo", "CAME", "Adafactor", "FlashAdamW")
PAPER = {"LOMO": 14.6, ADAMW: 102.2}  # GB, LOMO's table 1: 7B, 8 rows of 512 tokens, checkpointing
WARM_UP = 2  # steps before memory is measured


def rows(on: Setting) -> Rows:
    """Trains with each optimizer, and with LOMO on the batch of its paper."""
    whole = (1, on.length)
    runs = [(name, whole) for name in (*on.some(OPTIMIZERS), ADAMW)]
    runs.append(("LOMO", (8, max(1, on.length // 4))))
    for name, shape in runs:
        row = measured(on, name, shape)
        on.release()
        paper = PAPER.get(name) if shape != whole else None
        yield "Memory", row | {"paper, GB": paper}


def measured(on: Setting, name: str, shape: tuple[int, int]) -> Row:
    """Trains, and returns memory in GB (10^9 bytes), and losses."""
    row: Row = {"optimizer": name, "rows × tokens": f"{shape[0]} × {shape[1]}"}
    columns = ("weights, GB", "active, GB", "allocated, GB", "reserved, GB", "losses")
    try:
        found = trained(on, name, shape)
    except torch.OutOfMemoryError:
        return row | dict.fromkeys(columns) | {"losses": "does not fit", "verdict": RIGHT}
    return row | found


def trained(on: Setting, name: str, shape: tuple[int, int]) -> Row:
    """The same, if it fits."""
    model = checkpointed(on.large, on)
    tokens = torch.randint(0, on.large[0], shape, device=on.device)
    weights = sum(p.nbytes for p in model.parameters())
    losses: list[torch.Tensor] = []
    model.register_forward_hook(lambda module, args, out: losses.append(out.loss.detach()))
    step = fine_tuning(model, name, tokens)
    for _ in range(WARM_UP):
        step()
    on.sync()
    if not on.is_rehearsal:
        torch.cuda.reset_peak_memory_stats(on.device)
    for _ in range(on.steps // 4):
        step()
    on.sync()
    first, last = float(losses[0]), float(losses[-1])
    stats = {} if on.is_rehearsal else torch.cuda.memory_stats(on.device)
    peaks = {
        f"{kind}, GB": stats[f"{kind}_bytes.all.peak"] / 1e9 if stats else None
        for kind in ("active", "allocated", "reserved")
    }
    return {
        "weights, GB": weights / 1e9,
        **peaks,
        "losses": f"{first:.2f} → {last:.2f}",
        "verdict": RIGHT if math.isfinite(last) and last != first else WRONG,
    }
