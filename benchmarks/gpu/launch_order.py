"""Weights after training, with launches queued as usual and with launches that wait for each other.

If a kernel read memory before another stream had written it, or after it was reused, the bits would
differ: under ``CUDA_LAUNCH_BLOCKING=1`` no two kernels overlap. Attention and torch's operations
are set to deterministic algorithms, so that backward itself repeats its bits; a second queued run
shows that it does. TF32 is on and the default dtype is bf16, as in many training scripts.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator

import torch
from torch import nn

import ds_ext
from benchmarks.gpu.setting import RIGHT, WRONG, Rows, Setting, separately, using_kernels
from benchmarks.memory import OURS, llama

STEPS = 4
# One with row and column statistics, one with two rounds and momentum, one with 8-bit moments, one
# whose products use TF32 if anything does.
OPTIMIZERS = ("AdaLomo", "CAME", "FlashAdamW", "Muon")
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
BLOCKING = DETERMINISTIC | {"CUDA_LAUNCH_BLOCKING": "1"}

Trained = tuple[str, float]  # a hash of all weights, the last loss


def rows(on: Setting) -> Rows:
    """Compares queued, repeated and blocking runs, and a run on a second GPU."""
    queued, again = separately(on, train, on, (0, 0), env=DETERMINISTIC)
    (blocking,) = separately(on, train, on, (0,), env=BLOCKING)
    others: list[dict[str, Trained] | None] = [None]
    if torch.cuda.device_count() > 1:  # the first GPU stays the current device
        others = separately(on, train, on, (1,), env=DETERMINISTIC)
    for name in on.some(OPTIMIZERS):
        digest, loss = queued[name]
        other = others[0]
        found = {
            "again": again[name][0] == digest,
            "blocking": blocking[name][0] == digest,
            "not the current GPU": other[name][0] == digest if other else "one GPU here",
        }
        good = False not in found.values() and math.isfinite(loss)
        yield (
            "Same bits as the queued run",
            {"optimizer": name, "loss": loss, **found, "verdict": RIGHT if good else WRONG},
        )


def train(on: Setting, indices: tuple[int, ...]) -> list[dict[str, Trained]]:
    """Returns what training ends with on each of some GPUs."""
    found = []
    for index in indices:
        device = torch.device("cpu" if on.is_rehearsal else f"cuda:{index}")
        with deterministic(), using_kernels(on.trains_by):
            found.append({name: trained(name, on, device) for name in on.some(OPTIMIZERS)})
    return found


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """A context with deterministic algorithms, TF32, and bf16 as the default dtype."""
    held = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    was_filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_default_dtype(torch.bfloat16)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # which would hide early reads
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = was_filled
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(held[1])
        torch.set_default_dtype(held[0])


def trained(name: str, on: Setting, device: torch.device) -> Trained:
    """Trains the small model inside backward."""
    model = llama(on.small, torch.bfloat16, device)
    model.set_attn_implementation("eager")
    optimizer = OURS[name].for_model(model)
    fused = ds_ext.fuse_into_backward(model, optimizer)
    random = torch.Generator().manual_seed(3)
    loss = torch.zeros(())
    for _ in range(STEPS):
        tokens = torch.randint(0, on.small[0], (1, min(on.length, 512)), generator=random)
        loss = model(tokens.to(device), labels=tokens.to(device)).loss
        loss.backward()
        optimizer.step()
    fused.remove()
    return digest(model), float(loss.detach())


def digest(model: nn.Module) -> str:
    """A hash of the bits of all weights, made on their device: sums of bits times their places."""
    found = hashlib.sha256()
    for param in model.parameters():
        bits = param.detach().view(-1).view(torch.int16).long()
        places = torch.arange(1, len(bits) + 1, dtype=torch.int64, device=bits.device)
        found.update(int((bits * places).sum()).to_bytes(8, "little", signed=True))
    return found.hexdigest()
