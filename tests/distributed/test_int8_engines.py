"""Engines whose weights are stored in 8 bits: the same codes on all ranks and at all stages."""

import contextlib
import re
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partition_parameters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_ext
from ds_ext.engine import int8_partitions
from ds_ext.ops import int8
from ds_ext.planner import memory
from tests import worlds
from tests.common import engines
from tests.common.choose import params
from tests.common.int8_model import STORED, Model, batch, made
from tests.common.ranks import REFUSALS, identical, whole
from tests.common.states import same

STEPS = 2
# Gather all matrices, and compute as other stages do.
ZERO = {"stage3_param_persistence_threshold": 1000, "memory_efficient_linear": False}
ZERO["stage3_gather_16bit_weights_on_model_save"] = True


def config_of(stage, **more):
    zero = {"reduce_bucket_size": 70_000, **ZERO}
    lomo = {"type": "ds_ext.LOMO", "params": {"lr": 0.05}}
    usual = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "optimizer": lomo}
    return engines.config(stage, zero=zero, **usual | {"ds_ext": {"weight_storage": "int8"}} | more)


def engine_of(stage, model, **more):
    return deepspeed.initialize(model=model, config=config_of(stage, **more))[0]


def stored(engine):
    """The codes and scales of the weights, and the other parameters."""
    found = {n: x for n, x in whole(engine.module).items() if n not in STORED}
    for name in STORED:
        param = engine.module.get_parameter(name)
        held = int8.find(param)
        assert not held.holders
        for part in (held.codes, held.exponents):
            parts = [part.clone()]
            if held.partition is not None:
                group = param.ds_process_group
                parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, part.clone(), group)
            found[f"{name} {part.dtype}"] = torch.cat(parts)
    return found


def values(engine):
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


def run(stage: int, folder: str) -> dict[str, Any]:
    """Trains, saves, goes on; loads into a second engine and goes on -> what both have stored.

    The ranks begin unlike, and have the same codes all the time.
    """
    first = engine_of(stage, made(seed=dist.get_rank()))
    begin = stored(first)
    train(first, range(STEPS))
    first.save_checkpoint(folder)
    saved, halfway = values(first), stored(first)
    train(first, range(STEPS, 2 * STEPS))
    second = engine_of(stage, made(seed=5))
    with most_expanded(second) as most:
        second.load_checkpoint(folder)
    assert same(stored(second), halfway)
    train(second, range(STEPS, 2 * STEPS))
    after = stored(first)
    assert same(stored(second), after) and not same(after, halfway)
    assert all(map(identical, (begin, saved, halfway, after)))
    codes = [f"{name} torch.int8" for name in STORED]
    assert not any(torch.equal(halfway[name], begin[name]) for name in codes)
    assert all(x.dtype == torch.bfloat16 for x in saved.values())
    largest = max(x.numel() for name, x in saved.items() if name in STORED)
    assert most[0] == (largest // dist.get_world_size() if stage == 3 else largest)
    weight = second.module.up[0].weight
    half = deepspeed.utils.safe_get_full_fp32_param(weight) / 2
    deepspeed.utils.safe_set_full_fp32_param(weight, half)
    assert torch.equal(half, values(second)["up.0.weight"].float())
    return after


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
    engine = engine_of(stage, model, **HOW[how])
    for step in range(4):
        engine.backward(engine(batch(step)))
        engine.step()
    return stored(engine)


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


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("int8")
    return lambda *names: str(base / " ".join(map(str, names)))


RUNS = [(world, stage) for world in (2, 1) for stage in range(4)]
LOADS = [(world, stage) for world in (1, 2, 4) for stage in (0, 3)]


@pytest.mark.supports("weights stored in int8", stage="stage", optimizer="LOMO")
@pytest.mark.parametrize("world, stage", params(RUNS, [(2, 3)]))
def test_ranks_store_the_same_codes_and_go_on_from_a_checkpoint(folder, world, stage):
    after, of_stage_0 = (worlds.once(world, run, s, folder(world, s))[0] for s in (stage, 0))
    assert same(after, of_stage_0)


@pytest.mark.parametrize("world, stage", params(LOADS, [(1, 3)]))
def test_any_ranks_load_the_same_codes(folder, world, stage):
    worlds.once(2, run, 3, folder(2, 3))
    saved = worlds.run(2, loaded, 3, folder(2, 3))[0]
    for got in worlds.run(world, loaded, stage, folder(2, 3)):
        assert same(got, saved)


@worlds.on(3)
def test_runs_that_cut_groups_are_not_stored():
    with pytest.raises(REFUSALS, match="has a multiple of 32 elements on each rank"):
        engine_of(3, made())


SEVERAL = [(2, "zero.Init"), (4, "plain"), (2, "clipped"), (1, "AdaLomo")]
WAYS = SEVERAL + [((1, 2, 4)[i % 3], how) for i, how in enumerate(HOW)]
WAYS = list(dict.fromkeys([*WAYS, (4, "AdamW")]))


@pytest.mark.supports(
    "weights stored in int8",
    stage=3,
    optimizer=lambda how: how if how.startswith("Ada") else "LOMO",
)
@pytest.mark.parametrize("world, how", params(WAYS, SEVERAL[3:]))
def test_stage_3_takes_the_same_steps_as_stage_0(world, how):
    whole, begin = worlds.once(1, alike, 0, how)[0], made()
    for name in STORED:
        assert not torch.equal(
            whole[f"{name} torch.int8"], int8.Int8Weight(begin.get_parameter(name)).codes
        )
    for got in worlds.run(world, alike, 3, how):
        assert same(got, whole)


@worlds.on(2)
def test_partitions_are_stored_gathered_edited_and_exported(tmp_path):
    counted = {}
    for name, own in (("int8", {}), ("bf16", {"ds_ext": {}})):
        engine = engine_of(3, made().requires_grad_(True), **own)
        train(engine, range(2))  # DeepSpeed learns the order of modules
        with gathered_bytes() as sent, most_expanded(engine) as most:
            train(engine, range(1))
        counted[name] = sent[0]
        if name == "int8":
            first = engine
            assert most[0] == 2**15
    elements, shapes = (len(STORED) + 1) * 2**16, memory.shapes_of(made())
    assert counted["bf16"] - counted["int8"] == (2 * elements - int8.nbytes(elements)) / 2
    params = [first.module.get_parameter(name) for name in (*STORED, "still.weight")]
    held = [int8.find(p) for p in params]
    assert all(not h.holders and p.numel() == 0 for p, h in zip(params, held, strict=True))
    assert all(type(p.ds_tensor) is int8.Freed for p in params)
    every = [x for p in first.module.parameters() for x in (p, p.ds_tensor)]
    every = [x for x in every if type(x) is not int8.Freed] + [h.stored for h in held]
    storages = {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in every)}
    how = (3, 2, torch.bfloat16, 70_000)
    lomo = ds_ext.LOMO.hypers()
    plan = memory.optimizer_memory(lomo, shapes, *how, in_int8=True, persist=1000)
    assert sum(storages.values()) == plan.weights
    before = values(first)
    with contextlib.suppress(KeyError):
        with deepspeed.zero.GatheredParameters(params[1], modifier_rank=0):
            if dist.get_rank() == 0:
                with torch.no_grad():
                    params[1].mul_(2)
            raise KeyError
    after = values(first)
    assert same(after, before | {"up.0.weight": 2 * before["up.0.weight"]})
    first.save_16bit_model(tmp_path, "weights.bin")
    dist.barrier()
    saved, codes = torch.load(tmp_path / "weights.bin"), stored(first)
    assert all(torch.equal(saved[name], x) for name, x in after.items())
    assert same(values(engine_of(3, first.module, ds_ext={})), after)
    assert not any(map(int8.find, params))
    assert same(stored(engine_of(3, first.module)), codes)


@worlds.on(2)
def test_a_model_in_fp32_is_cast_at_each_stage():
    for stage in range(4):
        first, other = (engine_of(stage, model) for model in (made().float(), made()))
        assert same(stored(first), stored(other)) and same(values(first), values(other))


@worlds.on(2)
def test_models_and_uses_that_exclude_weights_in_8_bits_are_refused():
    no_support = re.escape('does not support weights that are stored in 8 bits ("ds_ext": {"weigh')
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(REFUSALS, match="is torch.float32: load the model in torch.bfloat16"):
        engine_of(3, made().float(), bf16={"enabled": False})
    with pytest.raises(REFUSALS, match="no trainable matrix is larger than zero_opt.*stage3_param"):
        engine_of(3, made(), zero_optimization={"stage": 3})
    with pytest.raises(REFUSALS, match=f"offload_states {no_support}"):
        engine_of(1, made()).offload_states()
    before, after = (made().requires_grad_(True) for _ in range(2))
    fully_shard(before, mesh=mesh)
    ds_ext.store_int8(after)
    cut = r"is a DTensor, and fully_shard \(FSDP2\) or tp_plan "
    with pytest.raises(REFUSALS, match=cut + no_support):
        ds_ext.store_int8(before)
    with pytest.raises(REFUSALS, match="non-contiguous parameters"):  # torch's own error
        fully_shard(after, mesh=mesh)
    fully_shard(after.norm, mesh=mesh)
    optimizer = ds_ext.LOMO(after.parameters())
    with pytest.raises(REFUSALS, match=rf"fully_shard \(FSDP2\) {no_support}"):
        ds_ext.fuse_into_backward(after, optimizer)
