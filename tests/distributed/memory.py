"""Bytes that real engines hold: jobs of test_memory.py."""

import gc
import time

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_ext
from ds_ext.distributed import dtensors
from ds_ext.ops import rounding, scratch
from ds_ext.optimizer import OPTIMIZERS
from tests.common.states import tensors
from tests.unit.test_memory import held

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
REAL_BUCKET = 2**17
MOST_SCRATCH = 8 * 2**20
QUIET = 0.3  # seconds
# On both sides of PERSIST; halves alike, for DeepSpeed rounds ZeRO-2's runs up to whole parameters.
SIZES = [(256, 256), *[(512, 256), (256, 512)] * 4, (256, 256)]


def network():
    return nn.Sequential(*(nn.Linear(cols, rows) for rows, cols in SIZES))


def alive():
    """Bytes of all tensors that are not frozen, and of their gradients."""
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    return held([*found, *(t.grad for t in found if t.is_leaf and t.grad is not None)])


def settled():
    """``alive`` once gloo's threads let go of what they sent: nothing was freed for a while."""
    least, since = alive(), time.monotonic()
    while time.monotonic() - since < QUIET:
        time.sleep(0.02)
        now = alive()
        if now < least:
            least, since = now, time.monotonic()
    return least


def measure_fsdp2(kind, dtype):
    """Bytes of weights and state on this rank between steps of a model that FSDP2 has cut."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network().to(DTYPES[dtype])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    hypers = {} if kind == "adamw" else {"lr": 1e-3}
    optimizer = (torch.optim.AdamW if kind == "adamw" else OPTIMIZERS[kind])(
        model.parameters(), **hypers
    )
    if kind != "adamw":
        ds_ext.fuse_into_backward(model, optimizer, bucket_size=REAL_BUCKET)
    model(torch.ones(1, 256, dtype=DTYPES[dtype])).float().sum().backward()
    optimizer.step()
    states = [dtensors.local(x) for s in optimizer.state.values() for x in tensors(s)]
    return held([dtensors.local(p) for p in model.parameters()]), held(states)


def measure(kind, stage, dtype):
    """Bytes alive on this rank: AdamW's at most, ours between steps."""
    gc.collect()
    gc.freeze()  # what there is now is not looked at
    module = network()
    zero = {"stage": stage, "reduce_bucket_size": REAL_BUCKET}
    params = {"lr": 1e-3, "torch_adam": True} if kind == "adamw" else {}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": zero,
        "optimizer": {"type": kind, "params": params},
    }
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=config
    )
    seen = []

    def look(*_, **__):
        seen.append(settled())

    if kind == "adamw":
        engine.basic_optimizer.register_step_pre_hook(look)
        if stage in (1, 2):  # a gradient has just come, and those before it may still be there
            name = "reduce_independent_p_g_buckets_and_remove_grads"
            reduce = getattr(engine.optimizer, name)
            setattr(engine.optimizer, name, lambda *args: (seen.append(alive()), reduce(*args)))
    for _ in range(2):  # the first step makes the state
        loss = engine(torch.ones(1, 256, dtype=DTYPES[dtype])).float().sum()
        engine.backward(loss)
        del loss
        engine.step()
    if kind != "adamw":
        assert scratch.nbytes() <= MOST_SCRATCH
        scratch.clear()  # not counted, nor is the table of noise
        rounding._noise.cache_clear()
        look()
    engine.destroy()
    return max(seen)
