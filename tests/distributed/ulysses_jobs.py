"""Four ranks, sequences divided over two of them by DeepSpeed's Ulysses: two such pairs."""

from dataclasses import astuple, dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp as sequences
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from torch import nn
from torch.nn import functional as F

from tests.common import by_role, engines
from tests.common.ranks import message, shared_folder
from tests.distributed import tensor_parallel_jobs
from tests.distributed.tensor_parallel_jobs import weights

VOCAB, WIDTH, HEADS, LENGTH, STEPS = 29, 24, 4, 10, 4
CLIPS = {"lomo": 0.0}  # 0: none; the others are clipped
# A gradient that is too large by a factor changes LOMO's update, but none of the others'.
HYPERS = tensor_parallel_jobs.HYPERS | {"lomo": {"lr": 1.0}, "sinkgd": {"lr": 0.05}}


@dataclass(frozen=True)
class Case:
    rule: str
    stage: int
    saved: bool = False  # and loaded half-way, by another engine


def _cases() -> dict[str, Case]:
    rules = [(rule, stage) for rule in ("lomo", "adalomo", "came") for stage in (1, 2, 3)]
    made = [Case(*c) for c in (*rules, ("lomo", 0), ("adamw", 2), ("sinkgd", 3))]
    made += [Case("came", 0), Case("galoreadamw", 3)]
    made += [Case("adalomo", stage, saved=True) for stage in (1, 3)]
    made += [Case("muon", stage) for stage in range(4)] + [Case("muon", 1, saved=True)]
    made += [Case("apollo", 2), Case("apollo", 3), Case("apollomini", 3)]
    return {"-".join([*map(str, astuple(c)[:2])] + ["saved"] * c.saved): c for c in made}


CASES = _cases()


class Attention(nn.Module):
    """Causal attention, [length, batch, heads, size] each -> the same."""

    def forward(self, q, k, v, *_):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)


class Block(nn.Module):
    """One layer, whose attention sees the whole sequence, and all else what this rank has."""

    def __init__(self, is_divided: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 50)
        self.down = nn.Linear(50, VOCAB)
        # the ranks of a sequence are known when there is an engine
        self.attend = DistributedAttention(Attention(), None) if is_divided else Attention()

    def forward(self, tokens):  # [length, batch]
        h = self.embed(tokens)
        q, k, v = (
            x.unflatten(-1, (-1, WIDTH // HEADS)).contiguous() for x in self.qkv(h).chunk(3, -1)
        )
        h = h + self.out(self.attend(q, k, v, 1).flatten(2))
        return self.down(torch.tanh(self.up(h)))


def make(is_divided: bool = False) -> Block:
    torch.manual_seed(11)
    return Block(is_divided)


def loss_of(model, step: int, pair: int, part: slice) -> torch.Tensor:
    """What the tokens ``part`` of a pair's sequences add to their mean loss."""
    generator = torch.Generator().manual_seed(31 * step + pair)
    tokens = torch.randint(0, VOCAB, (LENGTH, 3), generator=generator)
    target = torch.randn(LENGTH, 3, VOCAB, generator=generator)
    return (model(tokens[part]) - target[part]).square().sum() / target.numel()


def clip_of(rule: str) -> float:
    """The norm that gradients are clipped to, 0 for none."""
    return CLIPS.get(rule, 0.05)


def whole(rule: str, pairs: int, told: by_role.Told) -> engines.Alone:
    model = make()
    names = {p: n for n, p in model.named_parameters()}
    optimizer_of = by_role.optimizer(names, r"(qkv|out|up|down)\.weight", told["streams"])
    groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    optimizer = optimizer_of(rule, groups, HYPERS[rule])

    def loss(model: nn.Module, step: int, pair: int) -> torch.Tensor:
        return loss_of(model, step, pair, slice(None))

    return engines.alone(model, optimizer, loss, STEPS, pairs, clip_of(rule))


def start(case: Case) -> deepspeed.DeepSpeedEngine:
    own = HYPERS[case.rule] | tensor_parallel_jobs.OURS.get(case.rule, {})
    config = engines.config(
        case.stage,
        gradient_clipping=clip_of(case.rule),
        optimizer={"type": f"ds_ext.{case.rule}", "params": own | {"weight_decay": 0.0}},
        zero={"reduce_bucket_size": 1500},
    )
    return initialized(config)


def initialized(config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    """An engine of two ranks for each sequence."""
    if sequences._SEQUENCE_PARALLEL_GROUP is None:
        sequences.initialize_sequence_parallel(2)
    engine, *_ = deepspeed.initialize(model=make(True), config=config, mpu=sequences)
    engine.module.attend.spg = groups._get_sequence_parallel_group()
    return engine


def loss_here(engine: deepspeed.DeepSpeedEngine, step: int) -> torch.Tensor:
    """What this rank's half of its sequences adds to their loss."""
    pair, place = divmod(dist.get_rank(), 2)
    half = slice(place * LENGTH // 2, (place + 1) * LENGTH // 2)
    return loss_of(engine, step, pair, half)


def train(case: Case) -> dict[str, Any]:
    """Weights after the same training on these ranks, and gradients' norms."""
    engine = start(case)
    norms = []
    for step in range(STEPS):
        if case.saved and step == STEPS // 2:
            with shared_folder() as folder:
                engine.save_checkpoint(folder)
                engine.destroy()
                engine = start(case)
                engine.load_checkpoint(folder)
        engine.backward(loss_here(engine, step))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert groups._get_sequence_parallel_world_size() == 2
    told = by_role.told(engine.optimizer, engine.module)
    after, alike = weights(engine)
    engine.destroy()
    return {"after": after, "alike": alike, "norms": norms, "told": told}


def not_finite() -> dict[str, Any]:
    """A step in which the last rank alone has a gradient that is not finite."""
    engine = start(Case("lomo", 1))
    own = dict(engine.module.named_parameters())
    before = {n: p.detach().clone() for n, p in own.items()}
    if dist.get_rank() == dist.get_world_size() - 1:
        own["up.weight"].register_hook(lambda g: g / 0)
    engine.backward(loss_here(engine, 0))
    engine.step()
    return {
        "same": {n for n, p in own.items() if torch.equal(p, before[n])},
        "finite": all(p.isfinite().all() for p in own.values()),
    }


def refusals() -> dict[str, str]:
    """What is said of sizes and groups that do not fit."""
    sequences.initialize_sequence_parallel(2)
    mesh = {"sequence_parallel_size": 2, "data_parallel_size": 2}
    tensor = {"tensor_parallel": {"autotp_size": 2}}
    told = {}
    for name, sizes, mpu in (
        ("no mpu", {"sequence_parallel_size": 2}, None),
        ("a mesh", mesh, None),
        ("another size", {"sequence_parallel_size": 4}, sequences),
        ("tensors", tensor | {"sequence_parallel_size": 2}, sequences),
        ("tensors and an mpu", tensor, sequences),
    ):
        config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "AdaLomo"}}
        made = {"model": make(True), "config": config | sizes, "mpu": mpu}
        told[name] = message(lambda made=made: deepspeed.initialize(**made), ValueError)
    groups.mpu = sequences
    made = {"model": make(True), "config": config}
    told["of an earlier engine"] = message(lambda: deepspeed.initialize(**made), ValueError)
    groups.mpu = None
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "AdaLomo"}}
    made = {"model": make(True), "config": config, "mesh_param": (2, 2)}
    told["a mesh alone"] = message(lambda: deepspeed.initialize(**made), ValueError)
    return told
