"""Jobs with engines whose weights are stored in 8 bits."""

import contextlib

import deepspeed
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_ext
from ds_ext.ops import int8
from tests.common.int8_model import STORED, batch, made
from tests.common.ranks import message

STEPS = 2


def engine_of(stage, model, **extra):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 0,
        "optimizer": {"type": "ds_ext.LOMO", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 70_000},
        "ds_ext": {"weight_storage": "int8"},
    }
    return deepspeed.initialize(model=model, config=config | extra)[0]


def stored(engine):
    """The codes and scales of the weights, and the other parameters."""
    found = {n: p.detach().clone() for n, p in engine.module.named_parameters() if n not in STORED}
    for name in STORED:
        held = int8.find(engine.module.get_parameter(name))
        assert held.is_freed
        found[name] = held.stored.clone()
    return found


def train(engine, steps):
    for step in steps:
        engine.backward(engine(batch(step, dist.get_rank())))
        engine.step()


@contextlib.contextmanager
def most_expanded(engine):
    """The most elements of stored weights that had values at once within the context."""
    held = [int8.find(engine.module.get_parameter(name)) for name in STORED]
    most, expand = [0], int8.Int8Weight.expand

    def counted(self):
        expand(self)
        most[0] = max(most[0], sum(h.values.numel() for h in held if not h.is_freed))

    int8.Int8Weight.expand = counted
    try:
        yield most
    finally:
        int8.Int8Weight.expand = expand


def run(stage: int, folder: str) -> tuple:
    """Trains, saves, goes on; loads into a second engine and goes on. The ranks begin unlike."""
    rank = dist.get_rank()
    first = engine_of(stage, made(seed=rank))
    begin = stored(first)
    train(first, range(STEPS))
    first.save_checkpoint(folder)
    saved = {n: x.clone() for n, x in first.module.state_dict().items()}
    halfway = stored(first)
    train(first, range(STEPS, 2 * STEPS))
    second = engine_of(stage, made(seed=5))
    with most_expanded(second) as most:
        second.load_checkpoint(folder)
    loaded = stored(second)
    train(second, range(STEPS, 2 * STEPS))
    again = stored(first), stored(second)
    weight = second.module.up[0].weight
    half = deepspeed.utils.safe_get_full_fp32_param(weight) / 2
    deepspeed.utils.safe_set_full_fp32_param(weight, half)
    edited = second.module.state_dict()["up.0.weight"]
    return begin, halfway, loaded, *again, saved, (half, edited), most[0]


def refusals() -> list[str]:
    """What engines and ``fully_shard`` say of settings that exclude weights in 8 bits."""
    moe = {"expert_parallel": {"enabled": True, "autoep_size": 1}}
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    wrong = {"ds_ext": {"weight_storage": "int4"}}
    adalomo = {"optimizer": {"type": "AdaLomo", "params": {"lr": 1e-3, "weight_update": "master"}}}
    said = [
        message(lambda s=stage, e=extra: engine_of(s, made(), **e))
        for stage, extra in ((3, {}), (2, offload), (0, moe), (0, wrong), (0, adalomo))
    ]
    float32 = made().float()
    said.append(message(lambda: engine_of(1, float32)))
    engine = engine_of(1, made())
    before, after = (made().requires_grad_(True) for _ in range(2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(before, mesh=mesh)
    ds_ext.store_int8(after)
    whole = message(lambda: fully_shard(after, mesh=mesh))
    fully_shard(after.norm, mesh=mesh)
    optimizer = ds_ext.LOMO(after.parameters())
    return [
        *said,
        message(engine.offload_states),
        message(lambda: ds_ext.store_int8(before)),
        whole,
        message(lambda: ds_ext.fuse_into_backward(after, optimizer)),
    ]
