"""``chunk_loss``: loss and gradients are those of all logits, which never exist as a whole."""

import copy
import inspect

import pytest
import torch
import transformers as T
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ds_ext
from ds_ext.planner.live_memory import LiveMemory
from tests.common import updates
from tests.common.plain import fuse
from tests.common.ranks import message

VOCAB, ROWS, LENGTH = 67, 3, 11
SMALL = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
CLOSE = 2e-6


def make(**config) -> nn.Module:
    torch.manual_seed(0)
    model = T.LlamaForCausalLM(T.LlamaConfig(**SMALL, **config)).train()
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    return model


def adapted() -> nn.Module:
    return get_peft_model(make(), LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))


def inputs(ignored: bool = True) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    if ignored:
        labels[0, :5] = labels[2, 3] = -100
    return {"input_ids": tokens, "labels": labels}


def trained(model: nn.Module, **given):
    """The output, and the gradients after a backward pass."""
    model.zero_grad()
    output = model(**inputs(ignored="ignore_index" not in given), **given)
    output.loss.backward()
    return output, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check(found, grads):
    """Compares gradients by name."""
    assert found.keys() == grads.keys()
    for name, grad in grads.items():
        assert (found[name] - grad).norm() <= CLOSE * grad.norm(), name


GIVEN = {"mean": {}, "of several batches": {"num_items_in_batch": torch.tensor(17)}}
GIVEN |= {"shifted": {"shift_labels": inputs()["labels"].roll(-1, 1)}}
GIVEN |= {"ignored": {"ignore_index": 3}}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize(
    "make_model", [make, lambda: make(tie_word_embeddings=True), adapted], ids=["", "tied", "lora"]
)
def test_loss_and_gradients_are_those_of_all_logits(make_model, given):
    model = make_model()
    expected, grads = trained(model, **GIVEN[given])
    for chunks in (1, 4, None):
        ds_ext.chunk_loss(model, chunks)
        output, found = trained(model, **GIVEN[given])
        assert output.logits is None
        assert abs(output.loss - expected.loss) <= 1e-6 * expected.loss.abs()
        check(found, grads)
    ds_ext.chunk_loss(model, 0)
    assert trained(model)[0].logits is not None


@pytest.mark.parametrize("tied", [False, True])
def test_a_gradient_penalty_is_that_of_all_logits(tied):
    model = make(tie_word_embeddings=tied, attn_implementation="eager")
    ids, labels = inputs().values()
    penalties = []
    for chunks in (0, 1, 4):
        ds_ext.chunk_loss(model, chunks)
        model.zero_grad()
        x = model.model.embed_tokens(ids)
        (grad,) = torch.autograd.grad(
            model(inputs_embeds=x, labels=labels).loss, x, create_graph=True
        )
        grad.square().sum().backward()
        penalties.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    expected, *others = penalties
    for found in others:
        check(found, expected)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def test_the_logits_never_exist_as_a_whole():
    model = make()
    most = {}
    for chunks in (0, 4):
        ds_ext.chunk_loss(model, chunks)
        with Largest() as largest:
            trained(model)
        most[chunks] = largest.elements
    weight = model.lm_head.weight.numel()
    assert most[0] >= ROWS * LENGTH * VOCAB > weight >= most[4]


def test_the_gradient_of_the_head_exists_once():
    model = make()
    model.model.requires_grad_(False)
    model.lm_head = nn.Linear(32, 40_000, bias=False)
    model.config.vocab_size = 40_000
    ds_ext.chunk_loss(model, 64)
    with LiveMemory(model.parameters()) as live:
        before = live.now
        model(**inputs()).loss.backward()
        assert live.most - before < 1.5 * model.lm_head.weight.nbytes


def test_autocast_reaches_the_chunks():
    model, losses = make(), []
    for chunks in (0, 4):
        ds_ext.chunk_loss(model, chunks)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs()).loss
        loss.backward()
        losses.append((loss, model.lm_head.weight.grad))
    (expected, grad), (found, mine) = losses
    assert abs(found - expected) <= 1e-3 * expected
    assert (mine - grad).norm() <= 1e-2 * grad.norm()


def test_labels_are_smoothed_as_transformers_smooths_them():
    model = make()
    given = inputs()
    logits = model(input_ids=given["input_ids"]).logits
    smoother = T.trainer_pt_utils.LabelSmoother(0.2)
    expected = smoother({"logits": logits}, given["labels"], shift_labels=True)
    ds_ext.chunk_loss(model, 3, label_smoothing=0.2)
    assert abs(model(**given).loss - expected) <= 1e-6 * expected


def test_without_labels_or_gradients_there_are_logits():
    model = make()
    with torch.no_grad():
        expected = model(**inputs())
    ds_ext.chunk_loss(model, 3)
    with torch.no_grad():
        found = model(**inputs())
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)
    assert model(input_ids=inputs()["input_ids"]).logits is not None
    assert model(**inputs(), return_dict=False)[1] is None


def test_a_copy_computes_its_own_loss():
    model = make()
    ds_ext.chunk_loss(model, 3)
    other = copy.deepcopy(model)
    nn.init.zeros_(other.lm_head.weight)
    assert abs(other(**inputs()).loss - torch.tensor(VOCAB).log()) < 1e-5
    assert not torch.isclose(model(**inputs()).loss, other(**inputs()).loss)


def test_exact_clipping_runs_the_graph_twice():
    plain, chunked = make(), make()
    ds_ext.chunk_loss(chunked, 4)
    norms = []
    for model in (plain, chunked):
        fused, optimizer = fuse(model, max_grad_norm=0.1)
        fused.backward(model(**inputs()).loss)
        optimizer.step()
        norms.append(fused.norm)
    assert abs(norms[0] - norms[1]) <= CLOSE * norms[0]
    updates.check_each(chunked.state_dict(), dict(plain.named_parameters()), make().state_dict())


def test_trainer_sees_the_arguments_of_forward():
    model = make()
    expected = inspect.signature(model.forward)
    ds_ext.chunk_loss(model, 2)
    assert inspect.signature(model.forward) == expected


def test_what_has_no_such_loss_is_refused():
    def said(model, *args, **kwargs):
        return message(lambda: ds_ext.chunk_loss(model, *args, **kwargs))

    assert "no language model of transformers" in said(nn.Linear(2, 2))
    sizes = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
    masked = T.BertForMaskedLM(T.BertConfig(**sizes))
    assert "chunk_loss: the loss of BertForMaskedLM is ForMaskedLMLoss" in said(masked)
    config = T.Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=30.0)
    assert "final_logit_softcapping = 30.0" in said(T.Gemma2ForCausalLM(config))
    for chunks in (-1, True, 2.0):
        assert f"chunks is {chunks!r}; allowed: a whole number >= 0" in said(make(), chunks)
    assert "label_smoothing is 2" in said(make(), 2, label_smoothing=2)
    model = make()
    ds_ext.chunk_loss(model, 2)
    assert "for 33 labels" in message(lambda: model(**inputs(), logits_to_keep=2))
