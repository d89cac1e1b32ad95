"""Layers in pieces, a loss in chunks, a tiled MLP: the update is that of the whole batch, on ranks.

DeepSpeed's tiled loss is refused.
"""

import copy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import ulysses_sp
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import ds_ext
from ds_ext.forward.batch_splits import InPieces
from ds_ext.forward.chunked_loss import ChunkedHead
from ds_ext.optimizer import OPTIMIZERS
from tests import worlds
from tests.common import engines, updates
from tests.common.choose import params
from tests.common.ranks import whole
from tests.common.updates import check_each

STEPS, ROWS, LENGTH, VOCAB = 2, 4, 11, 31
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
NOTHING_KEPT = ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
ROUTERS = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.3}


@dataclass(frozen=True)
class Case:
    stage: int | str = 3  # "fsdp2": fuse_into_backward on parts of fully_shard
    splits: int = 3
    rule: str = "adalomo"
    max_norm: float = 0.0
    model: str = "llama"  # or "mixtral", "lora"
    chunks: int = 0
    given: str = "name"  # how the engine gets its optimizer: or an "object"


def make(kind: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SIZES, **ROUTERS))
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    if kind != "lora":
        return model
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, p in adapted.named_parameters():
        if "lora_B" in name:  # zeros would not move under AdaLomo
            nn.init.normal_(p, std=0.1)
    return adapted


def batch(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[rank % ROWS, 7:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask > 0, -100)}


def reference(case: Case, world: int) -> engines.Alone:
    model = make(case.model)
    optimizer = OPTIMIZERS[case.rule]([p for p in model.parameters() if p.requires_grad], lr=0.02)
    optimizer.separate_experts(model)

    def loss_of(model: nn.Module, *of: int) -> Tensor:
        return model(**batch(*of)).loss

    return engines.alone(model, optimizer, loss_of, STEPS, world, case.max_norm)


def train(case: Case) -> tuple[dict[str, Tensor], int]:
    """Weights after training, and how often ZeRO-3 gathered weights in the last step."""
    model, rank = make(case.model), dist.get_rank()
    kind, hypers, optimizer = OPTIMIZERS[case.rule], {"lr": 0.02}, None
    zero = {"reduce_bucket_size": 300, **{f"stage3_{key}": 0 for key in NOTHING_KEPT}}
    more: dict[str, Any] = {"gradient_clipping": case.max_norm, "zero": zero}
    if case.stage == "fsdp2":
        ds_ext.split_batch(model, case.splits)
        ds_ext.chunk_loss(model, case.chunks)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
    else:
        more["ds_ext"] = {"batch_splits": case.splits, "chunked_loss": case.chunks or False}
    if case.stage == "fsdp2" or case.given == "object":
        optimizer = kind(model.parameters(), **hypers)
    else:
        more["optimizer"] = {"type": kind.__name__, "params": hypers}
    engine = engines.start(model, optimizer, None if case.stage == "fsdp2" else case.stage, **more)
    replaced = {type(vars(module).get("forward")) for module in model.modules()}
    assert (InPieces in replaced) == (case.splits > 1)
    assert (ChunkedHead in replaced) == bool(case.chunks)
    gather = "_PartitionedParameterCoordinator__all_gather_params"
    original = getattr(PartitionedParameterCoordinator, gather)
    with mock.patch.object(
        PartitionedParameterCoordinator, gather, autospec=True, side_effect=original
    ) as gathers:
        for step in range(STEPS):
            gathers.reset_mock()
            engine.backward(engine(**batch(step, rank)).loss)
            engine.step()
    return whole(model), gathers.call_count


CASES = [
    *(Case(stage, max_norm=norm) for stage in (0, 1, 2, 3, "fsdp2") for norm in (0.0, 0.3)),
    *(Case(stage, model="mixtral", splits=2) for stage in (0, 3)),
    *(Case(stage, model="lora") for stage in (2, 3)),
    *(Case(stage, max_norm=0.3, chunks=5) for stage in (0, 2, 3, "fsdp2")),
    Case(3, splits=1, chunks=3, model="mixtral"),
    *(Case(3, rule=rule) for rule in ("lomo", "came")),
    *(Case(stage, chunks=5, given="object") for stage in (0, 3)),
]


@pytest.mark.parametrize("case", params(CASES, [Case(2)]))
def test_pieces_update_as_the_whole_batch(case):
    before, expected, _ = reference(case, world=2)
    for after, _ in worlds.run(2, train, case):
        assert updates.error(after, expected, before) <= 1e-5


def test_zero3_gathers_each_layer_once_for_all_pieces():
    counts = [worlds.run(2, train, Case(3, splits=n))[0][1] for n in (1, 4)]
    assert counts[1] <= counts[0]


TILED_STEPS, WORDS, WIDTH, TOKENS, TILES = 3, 11, 8, 6, 3


@dataclass(frozen=True)
class Tiling:
    stage: int | None
    max_norm: float = 0.0
    policy: str = "fused"
    tied: bool = False
    accumulation: int = 1
    reentrant: bool | None = None  # None: no checkpointing
    calls_modules: bool = True


class Model(nn.Module):
    """A language model; not tiled where ``tiled`` is False, which is the reference."""

    def __init__(self, case: Tiling, tiled: bool) -> None:
        super().__init__()
        self.case = case
        self.tiled = tiled
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight

    def mlp(self, x: Tensor) -> Tensor:
        if self.case.calls_modules:
            return self.down(torch.tanh(self.up(x)))
        return F.linear(torch.tanh(F.linear(x, self.up.weight)), self.down.weight)

    def block(self, x: Tensor) -> Tensor:
        if not self.tiled:
            return x + self.mlp(x)
        weights = [self.up.weight, self.down.weight]
        return x + ulysses_sp.TiledMLP.apply(Model.mlp, self, x, TILES, weights)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.case.reentrant is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.case.reentrant)

    def cross_entropy(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), targets)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.cross_entropy(self.hidden(tokens).flatten(0, 1), targets.flatten())


def make_tiled(case: Tiling, tiled: bool) -> Model:
    torch.manual_seed(4)
    return Model(case, tiled)


def words(number: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    tokens = torch.randint(0, WORDS, (2, TOKENS + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    return model(*words(number, rank))


CLIP = 0.3
TILED = [
    *(Tiling(stage, max_norm) for stage in (None, 0, 2, 3) for max_norm in (0.0, CLIP)),
    Tiling(None, CLIP, tied=True),
    *(Tiling(stage, norm, calls_modules=False) for stage in (None, 2) for norm in (0.0, CLIP)),
    Tiling(2, tied=True),
    Tiling(3, CLIP, tied=True),
    Tiling(2, CLIP, "sharded", accumulation=2),
    Tiling(3, 0.0, "sharded", tied=True, accumulation=2),
    *(Tiling(stage, CLIP, reentrant=reentrant) for stage in (2, 3) for reentrant in (True, False)),
]
QUICK = [(case,) for case in TILED[::5]]


@pytest.mark.parametrize("case", params([(case,) for case in TILED], QUICK), ids=str)
@worlds.on(2)
def test_tiled_functions_train_exactly(case):
    plain = make_tiled(case, tiled=False)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.5)
    how = {"max_norm": case.max_norm, "accumulation": case.accumulation}
    alone = engines.alone(plain, sgd, loss_of, TILED_STEPS, **how)
    assert min(alone.norms) > 1.1 * case.max_norm  # or it would show nothing
    model = make_tiled(case, tiled=True)
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.5)
    more = {"gradient_clipping": case.max_norm, "gradient_accumulation_steps": case.accumulation}
    engine = engines.start(model, optimizer, case.stage, case.policy, **more)
    got = engines.trained(engine, loss_of, TILED_STEPS, case.accumulation)
    check_each(got["after"], alone.after, alone.before)


@pytest.mark.parametrize("is_module", [True, False])
def test_the_tiled_loss_is_refused(is_module):
    model = nn.Linear(4, 4)
    ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters(), lr=0.5))
    x, y = torch.ones(1, 4, 4, requires_grad=True), torch.zeros(1, 4, dtype=torch.long)

    def loss(model, x, y):
        return nn.functional.cross_entropy(model(x), y)

    before = model.weight.clone()
    with pytest.raises(RuntimeError, match='TiledFusedLogitsLoss computes .*"chunked_loss": true'):
        head = model if is_module else model.forward
        ulysses_sp.TiledFusedLogitsLoss.apply(loss, head, x, y, None, 2, [model.weight], "mean")
    assert torch.equal(model.weight, before) and model.weight.grad is None


def test_a_gradient_penalty_is_refused():
    model = make_tiled(Tiling(None), tiled=True)
    ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters(), lr=0.5))
    loss = model(*words(0, 0))
    with pytest.raises(RuntimeError, match="their gradients cannot be differentiated"):
        torch.autograd.grad(loss, model.embed.weight, create_graph=True)


@pytest.mark.parametrize("tiles", [1, 3])
def test_tiles_outside_of_the_models_forward_pass_are_exact(tiles):
    model, x = nn.Linear(4, 4), torch.randn(1, 6, 4, requires_grad=True)
    alone = copy.deepcopy(model)
    lomo = ds_ext.LOMO(model.parameters(), lr=0.5)
    ds_ext.fuse_into_backward(model, lomo, bucket_size=1)
    given = x, tiles, [*model.parameters()]
    ulysses_sp.TiledMLP.apply(lambda module, x: module(x), model, *given).square().mean().backward()
    lomo.step()
    sgd = torch.optim.SGD(alone.parameters(), lr=0.5)
    alone(x).square().mean().backward()
    sgd.step()
    for own, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own, expected)
