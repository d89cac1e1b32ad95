"""Jobs with engines whose weights are stored in 8 bits."""

import contextlib
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partition_parameters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_ext
from ds_ext.engine import int8_partitions
from ds_ext.ops import int8
from tests.common.int8_model import STORED, Model, batch, made
from tests.common.ranks import message, whole

STEPS = 2
# Gather all matrices, and compute as other stages do.
ZERO = {"stage3_param_persistence_threshold": 1000, "memory_efficient_linear": False}
ZERO["stage3_gather_16bit_weights_on_model_save"] = True


def config_of(stage):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 0,
        "optimizer": {"type": "ds_ext.LOMO", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 70_000, **ZERO},
        "ds_ext": {"weight_storage": "int8"},
    }


def engine_of(stage, model, **extra):
    config = config_of(stage)
    return deepspeed.initialize(model=model, config=config | extra)[0]


def stored(engine):
    """The codes and scales of the weights, and the other parameters."""
    found = {n: x for n, x in whole(engine.module).items() if n not in STORED}
    for name in STORED:
        param = engine.module.get_parameter(name)
        held = int8.find(param)
        assert not held.holders
        for part in (held.codes, held.scales):
            parts = [part.clone()]
            if held.partition is not None:
                group = param.ds_process_group
                parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, part.clone(), group)
            found[f"{name} {part.dtype}"] = torch.cat(parts)
    return found


def values(engine):
    """The whole weights in bf16."""
    if engine.zero_optimization_stage() == 3:
        return whole(engine.module)
    return {n: x.clone() for n, x in engine.module.state_dict().items()}


def train(engine, steps):
    for step in steps:
        engine.backward(engine(batch(step, dist.get_rank())))
        engine.step()


@contextlib.contextmanager
def most_expanded(engine):
    """The most elements of stored weights that had values at once within the context."""
    found = [int8.find(engine.module.get_parameter(name)) for name in STORED]
    held = list(filter(None, found))
    most, hold = [0], int8.Int8Weight.hold

    def counted(self, param):
        hold(self, param)
        most[0] = max(most[0], sum(h.numel for h in held if h.holders))

    int8.Int8Weight.hold = counted
    try:
        yield most
    finally:
        int8.Int8Weight.hold = hold


def run(stage: int, folder: str) -> tuple:
    """Trains, saves, goes on; loads into a second engine and goes on. The ranks begin unlike."""
    rank = dist.get_rank()
    first = engine_of(stage, made(seed=rank))
    begin = stored(first)
    train(first, range(STEPS))
    first.save_checkpoint(folder)
    saved = values(first)
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
    edited = values(second)["up.0.weight"]
    return begin, halfway, loaded, *again, saved, (half, edited), most[0]


def loaded(stage: int, folder: str) -> dict[str, Any]:
    engine = engine_of(stage, made(seed=6))
    engine.load_checkpoint(folder)
    return stored(engine)


HOW = {"plain": {}, "zero.Init": {}, "reentrant": {}, "nonreentrant": {}}
HOW |= {"clipped": {"gradient_clipping": 0.05}, "accumulated": {"gradient_accumulation_steps": 2}}
HOW |= {"AdaLomo": {"optimizer": {"type": "AdaLomo", "params": {"lr": 0.01}}}}
HOW |= {"AdamW": {"optimizer": {"type": "ds_ext.AdamW", "params": {"lr": 0.001}}}}


def alike(stage: int, how: str) -> dict[str, Any]:
    """Trains with the same data on all ranks, so that the mean gradient is that of one rank."""
    model = made(how if "reentrant" in how else None)
    if how == "zero.Init" and stage == 3:
        weights = model.state_dict()
        with deepspeed.zero.Init(config_dict_or_path=config_of(stage)):
            model = Model()
        with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0):
            if dist.get_rank() == 0:
                model.load_state_dict(weights)
    config = config_of(stage) | HOW[how]
    engine = deepspeed.initialize(model=model, config=config)[0]
    for step in range(4):
        engine.backward(engine(batch(step)))
        engine.step()
    return stored(engine)


def partitions(folder: str) -> dict[str, Any]:
    """Bytes, edits and exports of an engine at stage 3."""
    found = {}
    for name, own in (("int8", {}), ("bf16", {"ds_ext": {}})):
        engine = engine_of(3, made().requires_grad_(True), **own)
        train(engine, range(2))  # DeepSpeed learns the order of modules
        with gathered_bytes() as sent, most_expanded(engine) as most:
            train(engine, range(1))
        found[name] = sent[0]
        if name == "int8":
            first, found["most"] = engine, most[0]
    params = [first.module.get_parameter(name) for name in (*STORED, "still.weight")]
    held = [int8.find(p) for p in params]
    found["released"] = all(
        not h.holders and p.numel() == 0 for p, h in zip(params, held, strict=True)
    )
    found["shown"] = any(type(p.ds_tensor) is not int8.Freed for p in params)
    memory = [x for p in first.module.parameters() for x in (p, p.ds_tensor)]
    memory = [x for x in memory if type(x) is not int8.Freed] + [h.stored for h in held]
    storages = {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in memory)}
    found["bytes"] = sum(storages.values())
    before = values(first)
    with contextlib.suppress(KeyError):
        with deepspeed.zero.GatheredParameters(params[1], modifier_rank=0):
            if dist.get_rank() == 0:
                with torch.no_grad():
                    params[1].mul_(2)
            raise KeyError
    found["edited"] = before, values(first)
    first.save_16bit_model(folder, "weights.bin")
    dist.barrier()
    found["saved"] = torch.load(f"{folder}/weights.bin")
    found["codes"] = [stored(first)]
    second = engine_of(3, first.module, ds_ext={})
    found["restored"] = values(second)
    assert not any(map(int8.find, params))
    found["codes"].append(stored(engine_of(3, first.module)))
    return found


@contextlib.contextmanager
def gathered_bytes():
    """The bytes that this rank passes to gathers of modules' weights within the context."""
    sent = [0]

    begin, gather = int8_partitions.CodesGather.__init__, partition_parameters._dist_allgather_fn

    def of_codes(self, params):
        begin(self, params)
        sent[0] += sum(codes.nbytes for codes in self.codes) // dist.get_world_size()

    def of_values(run, *args):
        sent[0] += run.nbytes
        return gather(run, *args)

    with (
        mock.patch.object(int8_partitions.CodesGather, "__init__", of_codes),
        mock.patch.object(partition_parameters, "_dist_allgather_fn", of_values),
    ):
        yield sent


def refusal(stage: int) -> str:
    return message(lambda: engine_of(stage, made()))


def refusals() -> list[str]:
    """What engines and ``fully_shard`` say of models and uses that exclude weights in 8 bits."""
    persistent = {"zero_optimization": {"stage": 3}}
    said = [
        message(lambda: engine_of(3, made().float(), bf16={"enabled": False})),
        message(lambda: engine_of(3, made(), **persistent)),
        message(engine_of(1, made()).offload_states),
    ]
    before, after = (made().requires_grad_(True) for _ in range(2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(before, mesh=mesh)
    ds_ext.store_int8(after)
    said.append(message(lambda: ds_ext.store_int8(before)))
    said.append(message(lambda: fully_shard(after, mesh=mesh)))
    fully_shard(after.norm, mesh=mesh)
    optimizer = ds_ext.LOMO(after.parameters())
    return [*said, message(lambda: ds_ext.fuse_into_backward(after, optimizer))]
