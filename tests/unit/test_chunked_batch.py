"""``split_batch``: the whole batch's gradients, each delivered once, in less memory."""

import copy
from collections import Counter

import pytest
import torch
import transformers
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import ds_ext
from tests.common.choose import crossed
from tests.common.ranks import message
from tests.common.states import from_file

SMALL = dict(vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
WIDE = SMALL | {"intermediate_size": 48, "num_key_value_heads": 2}
GPT2 = dict(vocab_size=61, n_embd=32, n_layer=3, n_head=4)
T5 = dict(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4)
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
T = transformers
MODELS = {
    "llama": (T.LlamaForCausalLM, T.LlamaConfig(**WIDE)),
    "gemma3": (T.Gemma3ForCausalLM, T.Gemma3TextConfig(**WIDE, head_dim=8, sliding_window=4)),
    "gpt2": (T.GPT2LMHeadModel, T.GPT2Config(**GPT2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
    "bert": (
        T.BertForMaskedLM,
        T.BertConfig(**SMALL, hidden_dropout_prob=0, attention_probs_dropout_prob=0),
    ),
    "t5": (
        T.T5ForConditionalGeneration,
        T.T5Config(**T5, dropout_rate=0.0, decoder_start_token_id=0),
    ),
    "mixtral": (T.MixtralForCausalLM, T.MixtralConfig(**WIDE, **ROUTERS, num_local_experts=4)),
}
ROWS, LENGTH = 6, 10


def make(kind: str) -> nn.Module:
    make_model, config = MODELS[kind]
    torch.manual_seed(0)
    model = make_model(copy.deepcopy(config)).train()
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    return model


def inputs(masked: bool) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 61, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, 7:] = mask[3, 5:] = 0
    return {"input_ids": tokens, "labels": tokens} | ({"attention_mask": mask} if masked else {})


def gradients(model: nn.Module, splits: int, masked: bool):
    """The loss, the gradients, and the greatest number of times that one was delivered."""
    names = ds_ext.split_batch(model, splits)
    assert len(names) == 6 if isinstance(model, T.T5ForConditionalGeneration) else 3
    delivered: Counter[torch.Tensor] = Counter()
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: delivered.update([p]))
        for p in model.parameters()
    ]
    model.zero_grad()
    loss = model(**inputs(masked)).loss
    loss.backward()
    for hook in hooks:
        hook.remove()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss, grads, max(delivered.values())


@pytest.mark.parametrize("kind, masked", crossed(MODELS, [(False,), (True,)]))
def test_gradients_are_those_of_the_whole_batch_and_come_once(kind, masked):
    model = make(kind)
    loss, expected, _ = gradients(model, 1, masked)
    for splits in (2, 4, 9):  # equal pieces, unequal ones, a row each
        found, grads, most = gradients(model, splits, masked)
        assert abs(found - loss) < 1e-6 and most == 1
        for name, grad in expected.items():
            assert (grads[name] - grad).norm() <= 2e-6 * grad.norm() + 1e-9, name


def test_one_piece_undoes_it_and_no_gradients_run_whole():
    model = make("llama")
    ds_ext.split_batch(model, 3)
    calls = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(**inputs(True))
    assert len(calls) == 1
    model(**inputs(True))
    assert len(calls) == 4
    ds_ext.split_batch(model, 1)
    model(**inputs(True))
    assert len(calls) == 5
    assert not any("forward" in vars(m) for m in model.modules())


def test_copies_and_pickles_run_in_pieces_of_their_own():
    model = make("llama")
    ds_ext.split_batch(model, 3)
    for other in (copy.deepcopy(model), from_file(model, weights_only=False)):
        with torch.no_grad():
            other.model.layers[0].mlp.down_proj.weight.zero_()
        (ours, theirs) = (m(**inputs(True)).loss for m in (model, other))
        assert not torch.equal(ours, theirs)
        theirs.backward()
        assert model.lm_head.weight.grad is None and other.lm_head.weight.grad is not None


def kept(model: nn.Module, splits: int) -> int:
    """Elements of the storages that autograd keeps after a forward pass, without weights."""
    ds_ext.split_batch(model, splits)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes() // 4
        return x

    with saved_tensors_hooks(note, lambda x: x):
        loss = model.model(**{k: v for k, v in inputs(False).items() if k != "labels"})[0].sum()
    del loss
    return sum(found.values())


def test_of_pieces_only_the_layers_inputs_are_kept():
    model = make("llama")
    whole, pieces = kept(model, 1), kept(model, 3)
    assert pieces < whole / 3


def test_transformers_own_checkpointing_is_not_run_as_well():
    model = make("llama")
    model.gradient_checkpointing_enable()
    ds_ext.split_batch(model, 2)
    calls = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    model(**inputs(False)).loss.backward()
    assert len(calls) == 4  # two pieces, forward and recomputed


class Layered(nn.Module):
    """A model whose layers are of a given class."""

    def __init__(self, layer, count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x, *args):
        for layer in self.layers:
            x = layer(x, *args)
        return x


class Applied(nn.Module):
    """A layer that computes a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.forward = function


class Keeping(nn.Module):
    """A layer, one of whose parts keeps a value, as ``keep`` does it."""

    def __init__(self, keep) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(5, 5), keep
        self.kept = nn.Module()
        self.kept.aux, self.kept.count, self.kept.width = None, 0, None
        self.kept.losses, self.kept.by_name = [], {"aux": None}
        self.kept.register_buffer("calls", torch.zeros(()))
        self.kept.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x, losses=()):
        y = self.linear(x)
        self.keep(self.kept, y.square().mean(), losses)
        return y


KEEPING = [  # a change of the part by a value or of a given list, and where it is
    (lambda part, aux, given: setattr(part, "aux", aux), "kept.aux"),
    (lambda part, aux, given: part.losses.append(aux), "kept.losses"),
    (lambda part, aux, given: part.by_name.update(aux=aux), "kept.by_name"),
    (lambda part, aux, given: setattr(part, "count", part.count + 1), "kept.count"),
    (lambda part, aux, given: part.calls.add_(1), "kept.calls"),
    (lambda part, aux, given: part.calls.fill_(1), "kept.calls"),
    (lambda part, aux, given: given.append(aux), "its arguments"),
]


@pytest.mark.parametrize("keep, place", KEEPING)
def test_a_layer_that_keeps_values_of_its_pieces_is_refused(keep, place):
    model = nn.ModuleDict({"layers": Layered(lambda: Keeping(keep))})
    ds_ext.split_batch(model, 3)
    text = f"layer 'layers.layers.0' changes {place} in its forward pass"
    with pytest.raises(ValueError, match=text):
        model.layers(torch.randn(6, 4, 5), *([[]] if place == "its arguments" else []))


def test_a_cache_that_serves_all_pieces_is_kept():
    def cache(part, aux, given):  # of the first piece, for all
        part.width = 5
        if len(part.table) < length:
            part.table = torch.arange(length)

    model = Layered(lambda: Keeping(cache))
    ds_ext.split_batch(model, 3)
    for length in (4, 3, 7):  # it grows
        model(torch.randn(6, length, 5)).sum().backward()
    assert len(model.layers[1].kept.table) == 7


@pytest.mark.parametrize(
    "function, given, text",
    [
        (lambda x: (x, x.mean()), (), "returns Tensor values that are not rows of the batch"),
        (lambda x: x.transpose(0, 1), (), "rows for pieces of .* do not keep the batch"),
        (lambda x, t: x + t.mean(), (torch.zeros(4, 4),), "may be the batch or another one"),
    ],
)
def test_what_cannot_be_divided_is_refused(function, given, text):
    model = Layered(lambda: Applied(function))
    ds_ext.split_batch(model, 2)
    x = torch.randn(4, 4 if given else 6, 5, requires_grad=True)
    with pytest.raises(ValueError, match=text):
        model(x, *given)


def test_unfit_layers_are_refused():
    norms = Layered(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert "splits is True; allowed" in message(lambda: ds_ext.split_batch(norms, True))
    assert "layers.0.1 is a batch norm" in message(lambda: ds_ext.split_batch(norms, 2))
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert "split_batch(model, splits, layers=" in message(lambda: ds_ext.split_batch(plain, 2))
    assert ds_ext.split_batch(plain, 2, layers=r"\d") == ["0", "1"]
    nested = nn.Sequential(plain)
    assert "contains layer '0.0'" in message(lambda: ds_ext.split_batch(nested, 2, layers=".*"))
    assert "matches no module" in message(lambda: ds_ext.split_batch(plain, 2, layers="x"))
    for wrong in (0, 1.5):
        assert "allowed: a whole number" in message(lambda n=wrong: ds_ext.split_batch(plain, n))


def test_a_cache_of_earlier_tokens_is_refused():
    model = make("llama")
    with torch.no_grad():
        cache = model(**inputs(False), use_cache=True).past_key_values
    ds_ext.split_batch(model, 2)
    with pytest.raises(ValueError, match="a cache of earlier tokens"):
        model(**inputs(False), past_key_values=cache)
