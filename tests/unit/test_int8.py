"""Weights stored in 8 bits: exact when nothing changes, unbiased when something does."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ds_ext
from ds_ext.config import config_checks
from ds_ext.engine import forward
from ds_ext.ops import int8, rounding
from tests.common import paths
from tests.common.int8_model import STORED, Model, batch, made
from tests.common.states import same

CHECKPOINTING = [None, "reentrant", "nonreentrant"]


def fused(model, kind=ds_ext.AdaLomo, **settings):
    optimizer = kind(model.parameters(), lr=settings.pop("lr", 1e-2), seed=settings.pop("seed", 0))
    return optimizer, ds_ext.fuse_into_backward(model, optimizer, **settings)


def train(model, optimizer, owner, steps):
    losses = []
    for step in steps:
        loss = model(batch(step))
        owner.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def held(model):
    return {name: int8.find(model.get_parameter(name)) for name in STORED}


@pytest.mark.parametrize("size", [2**16, 3 * 2**18 + 256])
def test_values_are_codes_times_powers_of_two_and_stay_when_encoded_again(size):
    torch.manual_seed(0)
    weight = (torch.randn(size) * torch.logspace(-30, 30, size)).bfloat16()
    weight[: int8.SIZE] = 0
    stored = int8.Int8Weight(weight)
    values, groups = stored.values(), weight.float().view(-1, int8.SIZE)
    mantissa, _ = torch.frexp(int8.scales_of(stored.exponents))
    assert (mantissa == 0.5).all() and values.dtype == torch.bfloat16
    # A scale of half the size would not reach the largest element of its group.
    scales = int8.scales_of(stored.exponents).float()
    assert (127 * scales >= groups.abs().amax(1)).all()
    assert (127 * scales / 2 < groups.abs().amax(1))[1:].all()
    error = (values.float().view(-1, int8.SIZE) - groups).abs()
    assert (error <= scales.unsqueeze(1) / 2).all()
    for key in range(5):
        stored.encode(values, key)
        assert torch.equal(stored.values(), values)


def test_values_rounded_by_a_key_stay_when_encoded_again():
    """Also where the largest is rounded down to 63 codes of a scale that was chosen for 64."""
    largest = torch.tensor([127.5 / 128, 1.0, 0.5, 127.5 * 2.0**-125, 127.5 * 2.0**-134])
    weight = (0.9 * largest.unsqueeze(1) * torch.rand(len(largest), int8.SIZE)).bfloat16().flatten()
    weight[:: int8.SIZE] = largest.bfloat16()
    for key in range(40):
        held = int8.Int8Weight(weight)
        held.encode(weight, key)
        again = int8.Int8Weight(held.values())
        assert again.stored.equal(held.stored)


def test_the_mean_over_keys_is_the_value():
    torch.manual_seed(0)
    weight = torch.randn(2**16).bfloat16()
    stored = int8.Int8Weight(weight)
    values = (weight + 1e-2 * torch.randn(2**16)).bfloat16()  # between two codes
    keys = 64
    total = torch.zeros(2**16, dtype=torch.float64)
    for key in range(keys):
        stored.encode(values, key)
        total += stored.values()
    scales = int8.scales_of(stored.exponents).double().unsqueeze(1)
    steps = values.double().view(-1, int8.SIZE) / scales
    is_steady = (steps.abs().amax(1) - 95).abs() < 30  # others may get other scales by rounding
    values, total, steps = (x.view(steps.shape)[is_steady] for x in (values, total, steps))
    p = steps - steps.floor()
    is_between = (p * keys > 4) & ((1 - p) * keys > 4)
    assert is_between.sum() > 10_000
    error = (total / keys - values) / (values / steps).abs()  # in codes
    z = (error / (p * (1 - p) / keys).sqrt())[is_between]
    assert abs(z.mean()) < 4 / len(z) ** 0.5
    assert 0.9 < z.square().mean() < 1.1
    assert (error[p == 0] == 0).all() and (p == 0).sum() > 1000


@pytest.mark.parametrize("code", [24.0, 96.0])
def test_the_two_roundings_of_steps_are_evenly_spread_together(code):
    """The variance of 32 moves by 1/32 of a code; independent numbers give 0.97."""
    model = nn.Linear(256, 256, bias=False).bfloat16()
    nn.init.constant_(model.weight, code)
    model.weight.data[:, 0] = 100
    ds_ext.store_int8(model)
    optimizer, owner = fused(model, ds_ext.LOMO, lr=1 / 32)
    for _ in range(32):
        owner.backward(-model(torch.ones(1, 256).bfloat16()).sum())
        optimizer.step()
    with ds_ext.expand_int8(model.parameters()):
        error = model.weight[:, 1:].float() - code - 1
    assert abs(error.mean()) < 0.1 and error.square().mean() < 0.15


def test_a_partition_has_its_part_of_the_codes():
    weight = torch.randn(256, 256).bfloat16()
    whole, parts = nn.Parameter(weight.clone()), weight.flatten().split(2**14)
    edited = (weight * 1.01).bfloat16().flatten()
    int8.store(whole)
    codes = []
    for i, part in enumerate(parts):
        param, partition = nn.Parameter(torch.empty(0)), part.clone()
        int8.store(param, partition=partition, start=i * 2**14)
        with pytest.raises(RuntimeError, match="isnan: a weight that is stored in 8 bits has"):
            partition.isnan()
        with int8.expanded([param]):
            assert torch.equal(partition, int8.find(param).values()) and not param.numel()
            partition.copy_(edited.split(2**14)[i])
            version = partition._version
            int8.update(param, key=3)
            assert partition._version > version  # cached norms of the run are out of date
        codes.append(int8.find(param).codes)
    with int8.expanded([whole]):
        whole.data.view(-1).copy_(edited)
        int8.update(whole, key=3)
    assert torch.equal(torch.cat(codes), int8.find(whole).codes)


def test_devices_and_blocks_have_the_same_random_bits(monkeypatch):
    for key, start, n in ((3, 0, 2**16), (2**32 - 1, 256, 3 * 2**16), (5 << 32, 2**18, 1000)):
        bits = torch.zeros(n, dtype=torch.int32)
        rounding.add_noise_(bits, key, start)
        assert torch.equal(bits, rounding._gathered(key, start, n, bits.device))
    weight = torch.randn(2**18 + 256).bfloat16()
    stored = int8.Int8Weight(weight)
    values, found = (weight * 1.01).bfloat16(), []
    for block in (2**16, 2**18):
        monkeypatch.setattr(int8, "BLOCK", block)
        stored.encode(values, 7)
        found.append(stored.values().clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("key", [None, 7, 2**48 - 1])
def test_kernels_encode_as_torchs_operations(key, monkeypatch):
    """Also zeros, the least and the largest normal numbers; a group with NaN or inf is NaN."""
    groups = 33
    torch.manual_seed(0)
    weight = torch.randn(groups, int8.SIZE) * torch.logspace(-38, 37, groups).unsqueeze(1)
    weight[0], weight[1], weight[2, 5], weight[3, 0] = 0, 2.0**-125, torch.nan, -torch.inf
    weight[4], weight[5, 1] = 63.4, torch.finfo(torch.bfloat16).max
    weight[6:12, 3] = torch.tensor([127, 127.5, 126.5, 63.75, 64, 1.5 * 2**-126])
    weight[12] = 63 * 2.0**-126  # of the least scale, which cannot be halved
    encoded = []
    for path in ("ops", "kernels"):
        paths.use(monkeypatch, path)
        values = weight.bfloat16().flatten().to(paths.DEVICE)
        stored = int8.Int8Weight(values, start=2**16 - 512)
        stored.encode(values, key)
        finite = ~int8.scales_of(stored.exponents).isnan()
        codes = stored.codes.view(groups, -1)[finite]
        encoded.append([codes.cpu(), int8.scales_of(stored.exponents)[finite].cpu(), finite.cpu()])
    assert finite.logical_not().nonzero().flatten().tolist() == [2, 3]
    assert all(map(torch.equal, *encoded))


@pytest.mark.parametrize("groups", [40, 33])  # whose runs begin at multiples of 16 bytes, or not
def test_kernels_decode_runs_as_torchs_operations(groups, monkeypatch):
    """Of ranks, one after another. Every code, the least scale, and groups that are NaN."""
    torch.manual_seed(0)
    weights = torch.randn(3, groups, int8.SIZE) * torch.logspace(-38, 37, groups).unsqueeze(1)
    weights[0, 0] = torch.arange(int8.SIZE) - 128
    weights[1, 1], weights[2, 0, 7] = 63 * 2.0**-126, torch.inf
    runs = weights.bfloat16().flatten(1)
    stored = torch.stack([int8.Int8Weight(run).stored for run in runs]).to(paths.DEVICE)
    decoded = []
    for path in ("ops", "kernels"):
        paths.use(monkeypatch, path)
        values = torch.zeros_like(runs, device=paths.DEVICE)
        decoded.append(int8.decode(stored, values).cpu())
    assert decoded[0][2, : int8.SIZE].isnan().all() and not decoded[0][:2].isnan().any()
    torch.testing.assert_close(*decoded, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_a_step_is_that_of_a_bf16_model_rounded_once_more(checkpointing):
    plain, model = made(checkpointing), made(checkpointing)
    before = {n: p.detach().clone() for n, p in plain.named_parameters()}
    ds_ext.store_int8(model)
    assert train(plain, *fused(plain), [0]) == train(model, *fused(model), [0])
    saved = model.state_dict()
    for name, stepped in plain.named_parameters():
        if name not in STORED:
            assert torch.equal(saved[name], stepped), name
            continue
        assert not torch.equal(saved[name], before[name])
        scales = (
            int8.scales_of(int8.find(model.get_parameter(name)).exponents)
            .float()
            .repeat_interleave(int8.SIZE)
        )
        steps = (saved[name].float() - stepped.float()).flatten() / scales
        assert (steps.abs() < 1).all(), name


@pytest.mark.slow
def test_a_compiled_model_and_kept_gradients_take_the_same_steps():
    found = []
    for backend, policy in (("", "fused"), ("aot_eager", "fused"), ("", "sharded")):
        model = made()
        ds_ext.store_int8(model)
        if backend:
            model.compile(backend=backend)
        losses = train(model, *fused(model, gradient_policy=policy), range(3))
        found.append((losses, model.state_dict()))
    assert same(found[0], found[1]) and same(found[0], found[2])


@pytest.mark.supports("weights stored in int8", stage=None, optimizer=lambda kind: kind.__name__)
@pytest.mark.parametrize("policy", ["fused", "sharded"])
@pytest.mark.parametrize("kind", [ds_ext.AdaLomo, ds_ext.AdamW, ds_ext.LOMO])
def test_steps_without_gradients_leave_the_weights(kind, policy):
    model = made()
    ds_ext.store_int8(model)
    before = {name: each.values().clone() for name, each in held(model).items()}
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.0)
    ds_ext.fuse_into_backward(model, optimizer, gradient_policy=policy)
    for step in range(10):
        (model(batch(step)) * 0).backward()
        optimizer.step()
    assert optimizer.state[model.embed.weight]["step"] == 10
    for name, each in held(model).items():
        assert torch.equal(each.values(), before[name]), name


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_weights_exist_only_while_they_are_used(checkpointing, monkeypatch):
    model = made(checkpointing)
    ds_ext.store_int8(model)
    optimizer, owner = fused(model, max_grad_norm=1.0, bucket_size=1)
    memory, most, decode = [], [0], int8.decode

    def counted(codes, values):
        memory.append(StorageWeakRef(values.untyped_storage()))
        most[0] = max(most[0], sum(not each.expired() for each in memory))
        return decode(codes, values)

    monkeypatch.setattr(int8, "decode", counted)
    for step in range(2):
        loss = model(batch(step))
        assert all(each.expired() for each in memory)
        owner.backward(loss)
        optimizer.step()
        assert all(each.expired() for each in memory)
    assert all(not each.holders for each in held(model).values())
    # Checkpointing may compute a layer again while a weight of the next one is in use.
    assert len(memory) > 2 * 3 * len(STORED) and most[0] <= (2 if checkpointing else 1)


def test_a_loaded_run_goes_on_with_the_same_bits():
    whole = made()
    ds_ext.store_int8(whole)
    run = fused(whole, ds_ext.AdamW, lr=1e-3)
    losses = train(whole, *run, range(3))
    weights = {name: x.clone() for name, x in whole.state_dict().items()}
    states = copy.deepcopy(run[0].state_dict())
    losses += train(whole, *run, range(3, 6))
    model = made()
    ds_ext.store_int8(model)
    model.load_state_dict(weights)
    optimizer, owner = fused(model, ds_ext.AdamW, lr=1e-3)
    optimizer.load_state_dict(states)
    assert train(model, optimizer, owner, range(3, 6)) == losses[3:]
    for name, each in held(model).items():
        assert torch.equal(each.stored, held(whole)[name].stored)


def test_expanded_weights_can_be_read_and_edited():
    model = made()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    ds_ext.store_int8(model)
    weight, other = model.up[0].weight, model.down[0].weight
    version = weight._version
    with pytest.raises(KeyError), ds_ext.expand_int8(model.parameters()):
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        with torch.no_grad(), ds_ext.expand_int8(weight):  # an inner context frees nothing
            weight.mul_(2)
        other.data = other.data * 4
        assert torch.equal(weight, 2 * before["up.0.weight"])
        raise KeyError
    assert weight._version > version  # cached norms of the weights are out of date
    assert all(not each.holders for each in held(model).values())
    changed = {"up.0.weight": 2, "down.0.weight": 4}
    for name, x in model.state_dict().items():
        assert torch.equal(x, changed.get(name, 1) * before[name]), name
    with ds_ext.expand_int8(weight), torch.no_grad():
        weight.normal_()
        edited = weight.detach().clone()
    error = model.state_dict()["up.0.weight"].float() - edited.float()
    scales = int8.scales_of(int8.find(weight).exponents).float().repeat_interleave(int8.SIZE)
    assert 0.4 < (error.flatten() / scales).abs().max() <= 0.5


def test_state_dicts_have_bf16_copies_and_share_tied_weights():
    model = made()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    ds_ext.store_int8(model)
    saved = model.state_dict()
    assert same(saved, before) and saved["head.weight"] is saved["embed.weight"]
    assert torch.equal(model.up.state_dict()["0.weight"], before["up.0.weight"])
    ds_ext.restore_bf16(model)
    assert torch.equal(model.head.weight, before["head.weight"])
    assert same(model.state_dict(), before)


@pytest.mark.parametrize("kind", ["a mapped file", "parts of one tensor"])
def test_weights_whose_memory_is_not_their_own_are_stored(kind, tmp_path):
    """As from_pretrained loads them on a CPU."""
    own = made()
    expected = {n: p.detach().clone() for n, p in own.named_parameters()}
    if kind == "a mapped file":
        torch.save(expected, tmp_path / "weights")
        parts = torch.load(tmp_path / "weights", mmap=True)
    else:
        whole = torch.cat([p.flatten() for p in expected.values()])
        sizes = [p.numel() for p in expected.values()]
        parts = dict(zip(expected, whole.split(sizes), strict=True))
    for name, p in own.named_parameters():
        p.data = parts[name].view_as(p)
    ds_ext.store_int8(own)
    other = made()
    ds_ext.store_int8(other)
    assert same(own.state_dict(), other.state_dict())


CONFIGS = [("zero_optimization.offload_optimizer.device", "cpu")]
CONFIGS += [("zero_optimization.offload_param.device", "cpu")]
CONFIGS += [("zero_optimization.zero_hpz_partition_size", 2), ("tensor_parallel.autotp_size", 2)]
CONFIGS += [("expert_parallel.enabled", True), ("fp16.enabled", True)]


def engine_with(config, stage=0):
    """The attributes of an engine that has no model yet."""
    return SimpleNamespace(
        _config=SimpleNamespace(_param_dict=config), zero_optimization_stage=lambda: stage
    )


@pytest.mark.parametrize("key, value", CONFIGS)
def test_settings_are_refused_by_their_key(key, value):
    config = value
    for name in reversed(key.split(".")):
        config = {name: config}
    if "zero_optimization" in config:
        config["zero_optimization"]["stage"] = 3
    asked = {"ds_ext": {"weight_storage": "int8"}}
    text = f"ds_ext.weight_storage = 'int8' is not supported together with {key} = {value!r}: "
    assert any(text in problem for problem in config_checks.problems(asked | config))
    assert not any("int8" in problem for problem in config_checks.problems(config))
    model = made()
    with pytest.raises(ValueError, match=re.escape(text)):
        forward.apply(engine_with(asked | config), model)
    ds_ext.store_int8(model)
    with pytest.raises(ValueError, match=re.escape(text)):
        forward.apply(engine_with(config), model)


@pytest.mark.parametrize("kind", ["PipelineModule", "deepspeed.moe"])
def test_models_of_engines_are_refused(kind):
    model = made()
    if kind == "deepspeed.moe":
        model.up[0].deepspeed_moe = nn.Module()
    else:
        model.__class__ = type("Pipeline", (PipelineModule,), {})
    with pytest.raises(ValueError, match=f'^{kind} does not support .*"weight_storage": "int8"'):
        forward.apply(engine_with({"ds_ext": {"weight_storage": "int8"}}), model)
    assert not any(map(int8.find, model.parameters()))
    stored = made()
    ds_ext.store_int8(stored)
    with pytest.raises(ValueError, match='stage = 3 divides .*"weight_storage": "int8"'):
        forward.apply(engine_with({}, stage=3), stored)


def test_refusals():
    with pytest.raises(ValueError, match="embed.weight is torch.float32: load"):
        ds_ext.store_int8(Model())
    with pytest.raises(ValueError, match="no trainable matrix"):
        ds_ext.store_int8(nn.Linear(8, 8).bfloat16())
    model = made()
    ds_ext.store_int8(model)
    with pytest.raises(ValueError, match="call it once"):
        ds_ext.store_int8(model)
    for key, value in (
        ("weight_update", "master"),
        ("weight_update", "nearest"),
        ("ema_decay", 0.9),
    ):
        optimizer = ds_ext.AdaLomo(model.parameters(), **{key: value})
        with pytest.raises(ValueError, match=f"{key} = .*weight_storage"):
            ds_ext.fuse_into_backward(model, optimizer)
    plain = made()
    fused(plain)
    with pytest.raises(ValueError, match="call store_int8 before it"):
        ds_ext.store_int8(plain)
    with pytest.raises(ValueError, match="assign=True"):
        model.load_state_dict(made().state_dict(), assign=True)
