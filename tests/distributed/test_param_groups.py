"""The JSON config: several rules in one model by ``param_groups``, and which names are ours. Fused
matrices that Muon splits, on real ranks against one process."""

import functools
import itertools
import re
from typing import Any

import deepspeed
import galore_torch
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_ext
from tests import worlds
from tests.common import by_role, engines, models, updates
from tests.common.authors import ordinary
from tests.common.choose import pairs, params
from tests.common.ranks import identical, logged, whole
from tests.common.updates import check, check_each, error

STEPS = 4
ENTRIES: list[dict[str, Any]] = [
    {"match": "embed|up.weight", "type": "GaLoreAdamW", "rank": None, "lr": 3e-3},
    {"match": r"norm|bias$", "type": "lomo", "lr": 0.1},
]
OPTIMIZER = {"type": "AdaLomo", "params": {"lr": 0.02, "param_groups": ENTRIES}}
CLIP = 0.5


def start(stage: int, optimizer: dict[str, Any] = OPTIMIZER) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    how: dict[str, Any] = {"optimizer": optimizer, "zero": {"reduce_bucket_size": 200}}
    return engines.start(models.Zoo(), None, stage, gradient_clipping=CLIP, **how)


def zoo_loss(model: Any, step: int, rank: int, world: int) -> torch.Tensor:
    return model(models.batch(step, world)[rank], step)


def advance(engine: deepspeed.DeepSpeedEngine, steps: range) -> None:
    engines.train(engine, functools.partial(zoo_loss, world=dist.get_world_size()), steps)


def train(stage: int, folder: str) -> dict[str, Any]:
    """The weights before and after, and those of a run that was broken off."""
    with logged() as said:
        engine = start(stage)
    lines = " ".join(said)
    assert dist.get_rank() or ("LOMO, lr=0.1 on: up.bias" in lines and "AdaLomo on: " in lines)
    before = whole(engine.module)
    advance(engine, range(STEPS // 2))
    engine.save_checkpoint(folder)
    advance(engine, range(STEPS // 2, STEPS))
    after = whole(engine.module)
    assert identical(after)
    again = start((stage + 1) % 4)
    again.load_checkpoint(folder)
    advance(again, range(STEPS // 2, STEPS))
    first, second = ENTRIES
    other = {"lr": 0.02, "param_groups": [first, {**second, "type": "LAMB"}]}
    changed = "group 2 of this checkpoint was saved with LOMO, but the optimizer has LAMB"
    with pytest.raises(ds_ext.CheckpointError, match=changed):
        start(stage, {"type": "AdaLomo", "params": other}).load_checkpoint(folder)
    return {"before": before, "after": after, "resumed": whole(again.module)}


LR = 0.01
DECAY = 0.1
# Its weights and biases decay differently.
network = functools.partial(models.layers, 6, 5, 3, seed=3)


def loss_of(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    return model(engines.rows(number, rank, 4, 6)).square().sum()


ADAMW = {"lr": LR, "weight_decay": DECAY, "betas": [0.9, 0.99]}


def taken(name: str, stage: int, params: dict[str, Any]) -> dict[str, Any]:
    """Trains by the optimizer that ``name`` takes -> its class, weights, what was logged."""
    named = {"type": name, "params": params}
    with logged() as said:
        engine = engines.start(
            network(), None, stage, optimizer=named, zero_force_ds_cpu_optimizer=False
        )
    weights = engines.trained(engine, loss_of, 4)["after"]
    inner = engine.optimizer.optimizer
    made = {
        "class": f"{type(inner).__module__}.{type(inner).__qualname__}",
        "said": [line for line in said if " is ds_ext's" in line or " is DeepSpeed's" in line],
        "weights": weights,
    }
    engine.destroy()
    return made


CASES = [(ranks, stage) for ranks in (2, 3) for stage in range(4)]


def by_hand(model):
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    ends = [n for n in named if "embed" in n or n == "up.weight"]
    vectors = [n for n in named if "norm" in n or n.endswith("bias")]
    rest = [n for n in named if n not in ends and n not in vectors]
    each = [
        ordinary("adalomo", [{"params": [named[n] for n in rest]}], {"lr": 0.02}),
        galore_torch.GaLoreAdamW([named[n] for n in ends], lr=3e-3),
        torch.optim.SGD([named[n] for n in vectors], lr=0.1),
    ]
    return by_role.Several(each)


@pytest.mark.parametrize("ranks, stage", params(CASES, {(2, 3)}))
def test_each_parameter_is_stepped_by_its_own_rule(tmp_path, ranks, stage):
    got = worlds.run(ranks, train, stage, str(tmp_path))[0]
    torch.manual_seed(0)
    model, steps, before = models.Zoo(), STEPS, got["before"]
    loss = functools.partial(zoo_loss, world=ranks)
    alone = engines.alone(model, by_hand(model), loss, steps, ranks, CLIP)
    updates.check(got["after"], alone.after, before, steps)
    check_each(got["resumed"], got["after"], before, steps)


@worlds.on(2)
def test_groups_of_a_script_keep_their_own_weight_decay():
    model = models.Zoo()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    vectors, others = ([x for x in trained if (x[1].ndim < 2) == it] for it in (True, False))
    adalomo = {"type": "AdaLomo", "params": {"lr": 0.02, "weight_decay": 0.1}}
    config = engines.config(2, optimizer=adalomo)
    groups = [{"params": others}, {"params": vectors, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0]
    with pytest.raises(ValueError, match="a tensor of shape .*, which is no parameter of"):
        deepspeed.initialize(model=models.Zoo(), model_parameters=groups, config=config)
    swapped = [*(model := models.Zoo()).parameters()][:: 1 - 2 * dist.get_rank()]
    with pytest.raises(ValueError, match="parameter group"):
        deepspeed.initialize(model=model, model_parameters=swapped, config=config)


OURS = ["AdamW is ds_ext's, not DeepSpeed's, whose type is \"AdamW\""]


def by_torch(spares_biases):
    model = network()
    decayed = [p for p in model.parameters() if p.dim() > 1 or not spares_biases]
    others = [p for p in model.parameters() if p.dim() == 1 and spares_biases]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), weight_decay=DECAY)
    return engines.alone(model, optimizer, loss_of, 4)


@pytest.mark.parametrize("stage", params([1, 3], [3]))
@pytest.mark.parametrize("name", ["ds_ext.AdamW", "DS_EXT.adamw", "AdamW"])
def test_a_name_that_both_have_is_deepspeeds_without_the_prefix(name, stage):
    ours = name != "AdamW"
    before, expected, _ = by_torch(spares_biases=ours)
    # torch_adam is DeepSpeed's: not its fused one, which it would have to build first
    params = ADAMW | ({} if ours else {"torch_adam": True})
    for rank, got in enumerate(worlds.once(2, taken, name, stage, params)):
        assert got["class"].startswith("ds_ext.AdamW" if ours else ("torch.", "deepspeed."))
        assert got["said"] == (OURS if ours and not rank else [])
        check_each(got["weights"], expected, before)


@pytest.mark.parametrize("name, said", [("LAMB", 1), ("ds_ext.lamb", 1), ("ds_ext.AdaLomo", 0)])
def test_names_of_ours_take_ours(name, said):
    for rank, got in enumerate(worlds.once(2, taken, name, 2, {})):
        assert got["class"].lower() == "ds_ext." + name.lower().removeprefix("ds_ext.")
        assert len(got["said"]) == (0 if rank else said)


SPLIT_STEPS = 3
SMALL = {"vocab_size": 31, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HIDDEN = SMALL | {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
# The model, its config, and the optimizer's keys.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "phi3": (
        "Phi3ForCausalLM",
        HIDDEN | {"intermediate_size": 20, "num_key_value_heads": 2},
        {
            "param_groups": [
                {"match": "qkv_proj", "split": [24, 12, 12]},
                {"match": "gate_up_proj", "split": [20, 20]},
                {"match": "o_proj", "heads": 4},
            ]
        },
    ),
    "falcon": (  # one key-value head: q, k and v lie one after another
        "FalconForCausalLM",
        HIDDEN | {"multi_query": True, "new_decoder_architecture": False, "bias": False},
        {"param_groups": [{"match": "query_key_value", "split": [24, 6, 6]}]},
    ),
}


def model_of(kind: str) -> nn.Module:
    """The same model on every rank. The gradients of keys' biases are rounding alone: no biases."""
    torch.manual_seed(3)
    name, config, _ = KINDS[kind]
    model_type = getattr(transformers, name)
    model: nn.Module = model_type(model_type.config_class(**config, initializer_range=0.2))
    for n, p in model.named_parameters():
        p.requires_grad_(not n.endswith("bias"))
    return model


def split_loss(model: Any, number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    ids = torch.randint(3, 31, (3, 8), generator=generator)
    return model(input_ids=ids, labels=ids).loss


def hypers(kind: str) -> dict[str, Any]:
    return {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": "fp32"} | KINDS[kind][2]


def start_split(model: nn.Module, kind: str, stage: int | None) -> Any:
    zero = {"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 30}
    if stage is None:
        return engines.start(model, ds_ext.Muon.for_model(model, **hypers(kind)), None, zero=zero)
    optimizer = {"type": "ds_ext.Muon", "params": hypers(kind)}
    return engines.start(model, None, stage, optimizer=optimizer, zero=zero)


def train_split(kind: str, way: Any) -> dict[str, Any]:
    """Weights before and after. ``way`` is a stage, None for no engine, or "fsdp2"."""
    model = model_of(kind)
    if way == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    engine = start_split(model, kind, None if way == "fsdp2" else way)
    before = whole(model)
    engines.train(engine, split_loss, SPLIT_STEPS)
    after = whole(model)
    assert identical(after)
    return {"before": before, "after": after}


WAYS = (None, 0, 1, 2, 3, "fsdp2")
QUICK = [("phi3", 2, "fsdp2"), ("falcon", 2, 2)]
SPLITS = pairs(itertools.product(KINDS, (2, 3), WAYS), chosen=QUICK)
CLOSE = 1e-3  # what Muon's iteration in fp32 may be off: test_muon.py


@pytest.mark.parametrize("kind, ranks, way", params(SPLITS, QUICK))
def test_sections_are_stepped_as_in_one_process(kind, ranks, way):
    """There each is a matrix of its own: unit/test_sections.py."""
    got = worlds.run(ranks, train_split, kind, way)[0]
    split, whole = (alone(kind, ranks, is_split) for is_split in (True, False))
    check(got["after"], split, got["before"], SPLIT_STEPS, CLOSE)
    entries = "|".join(entry["match"] for entry in KINDS[kind][2]["param_groups"])
    fused = {n: p for n, p in whole.items() if re.search(entries, n) and p.requires_grad}
    assert error(got["after"], fused, got["before"]) > 0.1


def alone(kind: str, ranks: int, is_split: bool) -> dict[str, Tensor]:
    """The weights of one process, whose fused matrices are split or not."""
    model, given = model_of(kind), hypers(kind)
    if not is_split:
        del given["param_groups"]
    engines.alone(model, ds_ext.Muon.for_model(model, **given), split_loss, SPLIT_STEPS, ranks)
    return dict(model.named_parameters())
