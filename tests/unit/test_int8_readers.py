"""Who reads or writes a weight that is stored in 8 bits gets the right value or an error.

Edits inside ``expand_int8``: test_int8.py.
"""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import ds_ext
from ds_ext.backward import int8_weights
from ds_ext.ops import int8
from tests.common.int8_model import WIDTH, batch, made
from tests.common.plain import fuse
from tests.common.states import from_file, same

RULE = "a weight that is stored in 8 bits has values only while its module computes"
ONES = torch.ones(4, WIDTH, dtype=torch.bfloat16)


def stored():
    model = made()
    ds_ext.store_int8(model)
    return model


def grads(model, step=0):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(model(batch(step)), trained)


# Each reader or writer of ``w``, a weight of ``m`` that is not expanded.
REFUSED = {
    "p.sum": lambda m, w: w.sum(),
    "p + 1": lambda m, w: w + 1,
    "p.clone": lambda m, w: w.clone(),
    "p.data": lambda m, w: w.data,
    "p.detach": lambda m, w: w.detach() + 1,
    "p.detach, kept": lambda m, w: copy.deepcopy(w.detach()),
    "p[0]": lambda m, w: w[0],
    "p[0] = 1": lambda m, w: w.__setitem__(0, 1),
    "p.numpy": lambda m, w: w.numpy(),
    "p.data_ptr": lambda m, w: w.data_ptr(),
    "x.copy_(p)": lambda m, w: torch.zeros(w.shape).copy_(w),
    "EMA": lambda m, w: torch.zeros(w.shape).bfloat16().lerp_(w, 0.5),
    "foreach": lambda m, w: torch._foreach_mul(list(m.parameters()), 2),
    "einsum": lambda m, w: torch.einsum("ij,kj->ik", w, w),
    "aten": lambda m, w: torch.ops.aten.mul(w, 2),
    "parameters_to_vector": lambda m, w: nn.utils.parameters_to_vector(m.parameters()),
    "F.linear with another module's weight": lambda m, w: F.linear(ONES, m.embed.weight),
    "zero_": lambda m, w: w.zero_(),
    "p *= 2": lambda m, w: w.__imul__(2),
    "set_": lambda m, w: w.set_(torch.zeros(3).bfloat16()),
    "as_subclass": lambda m, w: w.as_subclass(torch.Tensor),
    "out=": lambda m, w: torch.zeros(w.shape, out=w),
    "init.kaiming_uniform_": lambda m, w: nn.init.kaiming_uniform_(w),
    "p.data = x": lambda m, w: setattr(w, "data", torch.zeros(w.shape)),
    "LoRA merge": lambda m, w: w.data.add_(torch.ones(w.shape)),
    "vector_to_parameters": lambda m, w: nn.utils.vector_to_parameters(
        torch.ones(10**6), m.parameters()
    ),
    "model.half": lambda m, w: m.half(),
    "model.to(dtype)": lambda m, w: m.to(torch.float32),
    "model.to(another device)": lambda m, w: m.to("meta"),
    "model.to_empty": lambda m, w: m.to_empty(device="cpu"),
    "model.share_memory": lambda m, w: m.share_memory(),
    "parametrize": lambda m, w: nn.utils.parametrizations.weight_norm(m.up[0]),
    "spectral_norm": lambda m, w: nn.utils.spectral_norm(m.up[0]),
    "another method of the module": lambda m, w: nn.Linear.forward(m.up[0], ONES),
    "a custom function": lambda m, w: Sum.apply(w),
    "AveragedModel": lambda m, w: [
        torch.optim.swa_utils.AveragedModel(m).update_parameters(m) for _ in range(2)
    ],
}


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w.sum()

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


@pytest.mark.parametrize("name", REFUSED)
def test_readers_and_writers_outside_of_the_module_are_refused(name):
    model = stored()
    with pytest.raises(RuntimeError, match=RULE), torch.no_grad():
        REFUSED[name](model, model.up[0].weight)
    assert same([*model.state_dict().values()], [*made().state_dict().values()])
    assert same(grads(model), grads(made()))


@pytest.mark.parametrize("fused", [False, True])
def test_other_optimizers_are_refused(fused):
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        model = stored()
        model(batch(0)).backward()
        with pytest.raises(RuntimeError, match=RULE):
            kind(model.parameters(), lr=0.1, fused=fused).step()


def test_an_embedding_that_edits_its_weight_stays_in_bf16():
    model = nn.Sequential(nn.Embedding(512, 256, max_norm=1.0), nn.Linear(256, 256)).bfloat16()
    ds_ext.store_int8(model)
    assert [int8.find(layer.weight) is None for layer in model] == [True, False]


def test_a_parametrization_is_refused():
    model = stored()
    with pytest.raises(RuntimeError, match=RULE):
        nn.utils.parametrize.register_parametrization(model.up[0], "weight", nn.Identity())
        model(batch(0))  # older versions of torch register it


def moved(model):
    return model.to("cpu").cpu().bfloat16().to(torch.bfloat16)


SAME = {
    "torch.save": lambda model: from_file(model, weights_only=False),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
    "deepcopy of an expanded model": lambda model: in_context(model, copy.deepcopy),
    "copy.copy": copy.copy,
    "AveragedModel": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
    "moved": moved,
    "restored": lambda model: [ds_ext.restore_bf16(model), model][1],
    "forward in a context": lambda model: in_context(model, lambda m: [m(batch(1)), m][1]),
    "under inference_mode": lambda model: [torch.inference_mode()(model)(batch(0)), model][1],
}


def in_context(model, call):
    with ds_ext.expand_int8(model.parameters()):
        return call(model)


@pytest.mark.parametrize("name", SAME)
def test_copies_and_uses_keep_the_values(name):
    model = stored()
    other = SAME[name](model)
    for each in (model, other):
        assert torch.equal(each(batch(0)), made()(batch(0)))
        assert same(grads(each), grads(made()))
    if other is not model and name != "copy.copy":
        assert not any(map(int8.find, other.parameters()))  # in bf16
        with torch.no_grad():
            other.up[0].weight.zero_()
        assert torch.equal(model(batch(0)), made()(batch(0)))
        ds_ext.store_int8(other)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_resize_and_save_stored_weights(tied, tmp_path):
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 512}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=tied)
    plain = transformers.LlamaForCausalLM(config).bfloat16()
    for param in filter(lambda p: int8.fits(p.shape), plain.parameters()):
        param.data = int8.Int8Weight(param).values()
    model = copy.deepcopy(plain)
    ds_ext.store_int8(model)
    for each in (plain, model):
        with ds_ext.expand_int8(each.parameters()):
            each.resize_token_embeddings(600, mean_resizing=False)
    tokens = torch.arange(20)[None]
    assert torch.equal(model(tokens).logits[..., :512], plain(tokens).logits[..., :512])
    assert int8.find(model.get_input_embeddings().weight)  # stored anew
    with pytest.raises(RuntimeError, match=RULE):
        model.resize_token_embeddings(700)
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert same([*loaded.state_dict().values()], [*model.state_dict().values()])


def test_copy_stores_codes_and_views_of_contexts_stay():
    model = stored()
    weight = model.up[0].weight
    with torch.no_grad():
        weight.copy_(torch.full(weight.shape, 3.0))
    with ds_ext.expand_int8(weight):
        view = weight.detach()
    assert (view == 3).all() and (model.state_dict()["up.0.weight"] == 3).all()
    in_context(model, nn.Module.float)  # is allowed: the weights are fp32 from now on
    assert weight.dtype == torch.float32 and (weight == 3).all()
    assert not any(map(int8.find, model.parameters()))
    assert torch.isfinite(model(batch(0)))


class Output:
    """An output in which torch finds no tensors."""

    def __init__(self, y):
        self.y = y


class Leaf(nn.Linear):
    def forward(self, x):
        return Output(super().forward(x))


def test_graphs_find_the_weights_of_any_output():
    plain = Leaf(WIDTH, 512).bfloat16()
    leaf = copy.deepcopy(plain)
    with torch.no_grad():
        plain.weight.copy_(int8.Int8Weight(plain.weight).values())
    ds_ext.store_int8(leaf)
    found = []
    for each in (plain, leaf):
        x = ONES.clone().requires_grad_()
        (penalty,) = torch.autograd.grad((each(x).y ** 3).sum(), x, create_graph=True)
        penalty.square().sum().backward()
        found.append((penalty, x.grad, each.weight.grad))
    assert same(*found)


def test_hooks_around_a_module_get_its_other_tensors():
    """As activation checkpointing and offloading, which would otherwise keep its input."""
    layer, x, seen = stored().up[0], ONES.clone().requires_grad_(), []

    def pack(saved):
        seen.append(saved.shape)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = layer(x)
    y.sum().backward()
    assert seen == [x.shape] and torch.equal(layer.weight.grad, ONES.sum(0).expand(512, WIDTH))


def test_a_weight_norm_made_before_computes():
    found = []
    for stores in (False, True):
        layer = nn.utils.weight_norm(made().up[0])
        if stores:
            with torch.no_grad():
                layer.weight_v.copy_(int8.Int8Weight(layer.weight_v).values())
            ds_ext.store_int8(layer)
        y = layer(ONES)
        y.square().sum().backward()
        found.append((y, layer.weight_v.grad, layer.weight_g.grad))
    assert int8.find(layer.weight_v) and same(*found)


@pytest.mark.parametrize("what", ["weight", "input"])
def test_changes_between_forward_and_backward_are_errors(what):
    model, x = stored(), ONES.clone().requires_grad_() * 1
    layer = model.up[0]
    y = layer(x)
    with torch.no_grad(), ds_ext.expand_int8(layer.weight):
        pass  # a context without a change is not a change
    y.sum().backward(retain_graph=True)
    with torch.no_grad(), ds_ext.expand_int8(layer.weight):
        (layer.weight if what == "weight" else x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_module_that_fails_frees_its_weights():
    model = stored()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model.up[0](torch.ones(3, 3).bfloat16())
    assert not int8.find(model.up[0].weight).holders
    assert not int8_weights._running.modules


def test_a_view_may_be_made_while_another_thread_shows_the_weight():
    weight = next(p for p in stored().parameters() if int8.find(p))
    with int8.expanded([weight]):  # after Python has found the operation of a freed weight
        view = int8.Freed.__torch_function__(torch.Tensor.detach, (), (weight,))
    assert type(view) is int8.Freed and view.shape == weight.shape


def trained(model):
    """The losses of ten steps."""
    _, optimizer = fuse(model, lr=1e-3)
    losses = []
    for step in range(10):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_threads_share_a_model():
    """One trains while others evaluate, save and copy."""
    model, stop, whole = stored(), threading.Event(), stored()

    @torch.no_grad()
    def evaluate(read):
        while not stop.is_set():
            assert all(x.isfinite().all() for x in read(model))

    readers = [lambda m: [m(batch(0))], lambda m: m.state_dict().values()]
    readers += [lambda m: copy.deepcopy(m).parameters()]
    with ThreadPoolExecutor(len(readers)) as pool:
        others = [pool.submit(evaluate, read) for read in readers]
        try:
            losses = trained(model)
        finally:
            stop.set()
        for other in others:
            other.result()
    assert losses == trained(whole)
    assert same([*model.state_dict().values()], [*whole.state_dict().values()])
