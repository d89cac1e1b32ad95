"""Models of unusual parameters, memory, dtypes, gradients; models that others have wrapped."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_ext
from ds_ext.distributed import dtensors
from ds_ext.optimizer import OPTIMIZERS, param_checks
from tests.common import updates
from tests.common.choose import crossed, spread
from tests.common.hypers import FOR_ALL, NEEDED

HOW = {"fused": {}, "sharded": {"gradient_policy": "sharded"}}
HOW |= {"clipped": {"max_grad_norm": 0.1, "clip_mode": "previous"}}


def steps(model, optimizer, loss_of, count=3):
    for step in range(count):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def tokens(step):
    return torch.randint(0, 7, (4, 5), generator=torch.Generator().manual_seed(step))


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(7, 6, sparse=sparse)
        self.bags = nn.EmbeddingBag(7, 6, sparse=sparse, mode="sum")
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.words(x).mean(1) + self.words(x + 0).sum(1) + self.bags(x))


@pytest.mark.parametrize("name, how", spread(FOR_ALL, [("plain",), *((how,) for how in HOW)]))
def test_sparse_gradients_are_made_dense(name, how):
    def trained(sparse):
        model = Words(sparse)
        optimizer = OPTIMIZERS[name](model.parameters(), **NEEDED[name])
        if how != "plain":
            fused = ds_ext.fuse_into_backward(model, optimizer, **HOW[how])
            fused.clipping.previous_norm = 1.0
        return steps(model, optimizer, lambda m, step: m(tokens(step)).square().mean())

    start = list(Words(False).parameters())
    for p, got, begun in zip(trained(False), trained(True), start, strict=True):
        assert (got - p).norm() <= 1e-5 * (p - begun).norm()
        assert not torch.equal(p, begun)


class Pair(nn.Module):
    """Two parameters, made of tensors that may share memory."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor | None = None) -> None:
        super().__init__()
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(torch.ones(2) if b is None else b)


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


SHARING = {"expanded": lambda x: (x[:1].expand(3, 6),)}
SHARING |= {"windows": lambda x: (x.as_strided((4, 3), (1, 1)),), "the same": lambda x: (x, x)}
SHARING |= {"transposed": lambda x: (x, x.t()), "overlapping rows": lambda x: (x[:4], x[3:])}
SHARING |= {"overlapping columns": lambda x: (x[:, :4], x[:, 3:])}
APART = {"rows": lambda x: (x[:4], x[4:]), "columns": lambda x: (x[:, :4], x[:, 4:])}
APART |= {"transposed alone": lambda x: (x.t(),), "every second": lambda x: (x[::2, ::2], x[1::2])}


@pytest.mark.parametrize("kind", SHARING)
def test_trained_parameters_that_share_memory_are_refused(kind):
    model = Pair(*SHARING[kind](values(6, 6)))
    with pytest.raises(ValueError, match="share memory.*one nn.Parameter in both modules"):
        ds_ext.LOMO(model.parameters(), lr=0.1)
    if model.b.numel() > 2:  # frozen, it would keep its old values
        model.b.requires_grad_(False)
        optimizer = ds_ext.LOMO([model.a], lr=0.1)
        with pytest.raises(ValueError, match="share memory"):
            ds_ext.fuse_into_backward(model, optimizer)
    param_checks.refuse_shared_memory(model.requires_grad_(False).parameters())


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("kind", APART)
def test_views_of_one_tensor_that_do_not_overlap_are_stepped(kind, is_fused):
    models = [Pair(*APART[kind](values(6, 6))) for _ in range(2)]
    optimizers = [
        kind(m.parameters(), lr=0.1)
        for kind, m in zip((ds_ext.LOMO, torch.optim.SGD), models, strict=True)
    ]
    if is_fused:
        ds_ext.fuse_into_backward(models[0], optimizers[0])
    got, expected = (
        steps(m, o, lambda m, step: m.a.exp().sum() + m.b.exp().sum())
        for m, o in zip(models, optimizers, strict=True)
    )
    for p, q in zip(got, expected, strict=True):
        torch.testing.assert_close(p, q)


class Rotating(nn.Module):
    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        turn = torch.polar(torch.ones(2), torch.arange(2.0))
        self.turn = nn.Parameter(turn, requires_grad=trains)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.linear(x).view(-1, 2, 2)) * self.turn
        return torch.view_as_real(pairs).square().sum()


@pytest.mark.parametrize("fuse", [True, False])
def test_a_complex_parameter_may_be_frozen_but_not_trained_later(fuse):
    with pytest.raises(ValueError, match="complex64.*view_as_real"):
        ds_ext.LOMO(Rotating(trains=True).parameters(), lr=0.1)
    model = Rotating(trains=False)
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    if fuse:
        ds_ext.fuse_into_backward(model, optimizer)
    before = model.linear.weight.detach().clone()
    model(torch.randn(3, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(model.linear.weight, before)
    model.turn.requires_grad_(True)
    state = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match="complex64"):
        model(torch.randn(3, 4)).backward()
        optimizer.step()
    assert all(torch.equal(p, state[n]) for n, p in model.named_parameters())


@pytest.fixture
def group(tmp_path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def wrapped(kind):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if kind == "FSDP2":
        fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    elif kind == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        model = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=kind == "FSDP1"
        )
    return model


@pytest.mark.parametrize("kind", ["FSDP1", "DDP"])
def test_models_that_others_wrapped_are_refused(group, kind):
    model = wrapped(kind)
    with pytest.raises(ValueError, match=r"pass the model itself.*fully_shard"):
        ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters(), lr=0.1))


def test_flat_parameters_are_refused(group):
    with pytest.raises(ValueError, match=r"FSDP1.*fully_shard \(FSDP2\)"):
        ds_ext.LOMO(wrapped("FSDP1 flat").parameters(), lr=0.1)


def test_parameters_beside_those_of_fully_shard_are_refused(group):
    model = wrapped("FSDP2")  # the first layer alone
    before = [dtensors.local(p).clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"1\.weight is trained but is not a DTensor.*fully_shard"):
        ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters(), lr=0.1))
    model[1].requires_grad_(False)
    with pytest.raises(ValueError, match="remove the argument group"):
        optimizer = ds_ext.LOMO(model[0].parameters(), lr=0.1)
        ds_ext.fuse_into_backward(model, optimizer, group=dist.group.WORLD)
    ds_ext.fuse_into_backward(model, optimizer)
    for p, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(dtensors.local(p), was)


def test_deepspeed_is_given_no_model_that_torch_has_spread(group):
    from ds_ext.distributed.unsupported_wrappers import refuse_dtensors

    with pytest.raises(ValueError, match=r"0\.weight is a DTensor.*ZeRO"):
        refuse_dtensors(wrapped("FSDP2"))


class Mixed(nn.Module):
    """Layers of the given dtypes, one after the other."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.double().square().sum()


def optimizer_of(name, params):
    hypers = NEEDED[name] | {"weight_update": "nearest"}
    return OPTIMIZERS[name](params, **hypers)


def make(dtypes):
    torch.manual_seed(9)
    return Mixed(dtypes)


F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
CLIPPED, KEPT = {"max_grad_norm": 0.01}, {"gradient_policy": "sharded"}
CASES = [*(([F64, F64], how) for how in ({}, CLIPPED, KEPT))]
CASES += [*(([F32, F64, F32], how) for how in ({}, CLIPPED, KEPT))]
CASES += [*(([BF16, F64, F32], how) for how in ({}, KEPT))]


@pytest.mark.parametrize("name, dtypes, how", crossed(FOR_ALL, CASES), ids=str)
def test_parameters_of_all_dtypes_step_as_those_of_one_do(name, dtypes, how):
    model, plain = make(dtypes), make(dtypes)
    before = {n: p.detach().clone() for n, p in plain.named_parameters()}
    optimizer = optimizer_of(name, model.parameters())
    fused = ds_ext.fuse_into_backward(model, optimizer, bucket_size=10**6, **how)
    alone = [
        optimizer_of(name, [p for p in plain.parameters() if p.dtype == dtype])
        for dtype in set(dtypes)
    ]
    for step in range(3):
        x = torch.randn(5, 6, dtype=F64, generator=torch.Generator().manual_seed(step))
        fused.backward(model(x))
        optimizer.step()
        plain.zero_grad()
        plain(x).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), how.get("max_grad_norm", torch.inf))
        for each in alone:
            each.step()
    bound = 1e-11 if set(dtypes) == {F64} else 1e-5
    expected, found = dict(plain.named_parameters()), dict(model.named_parameters())
    updates.check_each(found, expected, before, close=bound)
    assert all(found[n].dtype == p.dtype and not p.equal(before[n]) for n, p in expected.items())
