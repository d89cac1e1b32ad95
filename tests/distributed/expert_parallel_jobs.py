"""Runs of deepspeed.moe's layers on real ranks, some of whose experts get no token."""

import re
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe import mappings
from deepspeed.moe.layer import MoE
from deepspeed.runtime.sequence_parallel import parallel_state_sp as sequences
from deepspeed.utils import groups
from torch import nn

import ds_ext
from tests.common import by_role, engines
from tests.distributed import mixtures
from tests.distributed.mixtures import Run
from tests.distributed.test_tensor_parallel import rebuilt

STEPS = 4
WIDTH, INNER, EXPERTS, LAYERS = 8, 7, 4, 2


def _runs() -> dict[str, Run]:
    def run(rule: str, *how: Any, **more: Any) -> Run:
        return Run("moe", rule, *how, **more)

    made = {}
    for stage, world, size in (
        *((0, 2, 2), (0, 4, 1), (0, 4, 2), (1, 2, 1), (1, 4, 2)),
        *((2, 2, 2), (2, 4, 1), (2, 4, 2)),
    ):
        made[f"came-stage{stage}-ranks{world}-ep{size}"] = run("came", stage, world, size)
    for rule in ("lomo", "adalomo", "adafactor", "lamb", "galoreadamw"):
        made[f"{rule}-ranks2-ep2"] = run(rule, 1, 2, 2)
    made["adalomo-ranks4-ep4"] = run("adalomo", 2, 4, 4)
    made["clip-stage0"] = run("adalomo", 0, 4, 2, max_norm=0.05)
    made["clip-sharded-stage2"] = run("came", 2, 2, 2, 0.05, "sharded")
    for rule in ("flashadamw", "lion"):
        made[f"{rule}-ranks2-ep2"] = run(rule, 2, 2, 2)
    made["json"] = run("adalomo", 1, 2, 2, json=True)
    for i, rule in enumerate(("apollo", "apollomini", "muon")):
        made[f"json-{rule}"] = run(rule, i, 2, 2, json=True)
        made[f"tensor-{rule}"] = run(rule, 2 - i, 4, 2, tensor=2, json=True)
    made["json-apollo-1"] = run("apollo", 1, 2, 2, json=True)
    for stage in (0, 1):
        made[f"json-muon-{stage}"] = run("muon", stage, 4, 2, max_norm=0.05, json=True)
        made[f"tensor-muon-{stage + 1}"] = run("muon", stage + 1, 4, 2, tensor=2, json=True)
    made["json-muon-resumed"] = run("muon", 1, 2, 2, then=(0, 2), json=True)
    made["resumed"] = run("came", 1, 2, 2, then=(1, 2))
    made["resumed-ep4"] = run("came", 2, 4, 2, then=(0, 4))
    made["resumed-ep1"] = run("lamb", 0, 4, 4, then=(1, 1))
    for i, rule in enumerate(("lomo", "came", "galoreadamw")):
        for size in (1, 2, 4)[i:]:
            made[f"tensor-{rule}-stage{i}-ep{size}"] = run(rule, i, 4, size, tensor=2)
    made["tensor-clip"] = run("adalomo", 1, 4, 2, max_norm=0.05, tensor=2)
    made["tensor-resumed"] = run("came", 2, 4, 2, then=(1, 4), tensor=2)
    return {f"moe-{name}": one for name, one in made.items()}


RUNS = _runs()
DIVIDED = [
    {"patterns": [r"wide\.weight$"], "partition_type": "column"},
    {"patterns": [r"narrow\.weight$"], "partition_type": "row"},
]


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH))


def values() -> dict[str, torch.Tensor]:
    """All weights, by the names of ``Whole``."""
    torch.manual_seed(5)
    made = {n: torch.randn_like(p) * 0.4 for n, p in Whole().named_parameters()}
    made["narrow.weight"] *= 0.2  # or LOMO would diverge
    for layer in range(LAYERS):
        gate = made[f"layers.{layer}.gate"]
        gate[3] = gate[2] - 0.05  # is seldom the first
    return made


class Mixture(nn.Module):
    """All experts in one process: y = Σ p(e) · expert_e(x) over the k first of p = softmax(G·x).

    With k = 2 the probabilities of the two are divided by their sum.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.gate = nn.Parameter(torch.empty(EXPERTS, WIDTH))
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p, chosen = (x @ self.gate.T).softmax(-1).topk(self.k)
        if self.k > 1:
            p = p / p.sum(-1, keepdim=True)
        every = torch.stack([e(x) for e in self.experts], -2)  # [..., experts, width]
        picked = every.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, x.shape[-1]))
        return (picked * p.unsqueeze(-1)).sum(-2)


class Spread(nn.Module):
    def __init__(self, k: int, size: int) -> None:
        super().__init__()
        how = {"drop_tokens": False, "use_rts": False, "min_capacity": 0}
        self.moe = MoE(WIDTH, expert(), EXPERTS, size, k, top2_2nd_expert_sampling=False, **how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x)[0]


class Whole(nn.Module):
    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(
            Mixture(1 + i) if size is None else Spread(1 + i, size) for i in range(LAYERS)
        )
        self.down = nn.Linear(WIDTH, 3)
        self.wide, self.narrow = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        # Of two probabilities divided by their sum, the gradient of other experts' rows is 0 but
        # for rounding, and statistics would make updates of that.
        [*self.layers[1].parameters()][0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        h = h + self.narrow(torch.tanh(self.wide(h)))
        for layer in self.layers:
            h = h + layer(h)
        return (self.down(h) - x[:, :3]).square().mean()


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """A rank's parameters by the names that they have in one process."""
    found = {}
    for name, p in model.named_parameters():
        name = name.replace("moe.deepspeed_moe.gate.wg.weight", "gate")
        if match := re.match(r"(.*)moe.deepspeed_moe.experts.deepspeed_experts.(\d+)(.*)", name):
            first, own, rest = match.groups()
            count = EXPERTS // dist.get_world_size(groups._get_expert_parallel_group(p.group_name))
            number = count * groups._get_expert_parallel_rank(p.group_name) + int(own)
            name = f"{first}experts.{number}{rest}"
        found[name] = p
    return found


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Of few tokens; in some steps they are nearly the same."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 5, generator=generator)  # as many as two ranks can share
    if step % 3 == 2:
        x = 0.1 * x + torch.arange(5)
    return model(x if step else torch.randn(400, 5, generator=generator))


def gather(output: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    """DeepSpeed gathers tokens of ranks of tensor parallelism into a flat tensor; gloo wants both
    to be flat."""
    dist.all_gather_into_tensor(output, part.view(-1), group=group)


def start(run: Run, stage: int, size: int, **how: Any) -> deepspeed.DeepSpeedEngine:
    model = Whole(size)
    if f"ep_size_{size}" not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(size)  # which tell what experts these are
    with torch.no_grad():
        for name, p in named(model).items():
            p.copy_(values()[name])
    return mixtures.start(run, model, stage, 200, DIVIDED, **how)


@mock.patch.object(mappings.deepspeed.comm, "all_gather_into_tensor", gather)
def train(run: Run) -> dict[str, Any]:
    engine, found = mixtures.trained(run, start, loss_of, STEPS)
    own, state = named(engine.module), engine.optimizer.state
    return found | {
        "after": {n: rebuilt(p, p.detach().clone()) for n, p in own.items()},
        "steps": {state[p]["step"] for p in own.values() if p.requires_grad},
        "streams": by_role.streams_of(engine.optimizer, {p: n for n, p in own.items()}),
    }


def reference(run: Run, streams: dict[str, int]) -> tuple[engines.Alone, torch.Tensor]:
    """One process with all experts and the global batch; and its idle experts."""
    model = Whole()
    model.load_state_dict(values())
    named = dict(model.named_parameters())
    optimizer = mixtures.optimizer(run, named, "(weight|gate)$", streams)  # all are linear layers'
    experts = [e[0].weight for layer in model.layers for e in layer.experts]
    return mixtures.alone(run, model, optimizer, loss_of, STEPS, experts)


def refusals() -> None:
    sequences.initialize_sequence_parallel(2)
    experts = {"patterns": [r".*experts\..*weight$"], "partition_type": "column"}
    plan = {"use_default_specs": False, "layer_specs": [experts]}
    divided = {"tensor_parallel": {"autotp_size": 2, "partition_config": plan}}
    usual, config = Run("moe", "lomo", 1, 2, 2), engines.config(1, optimizer={"type": "LOMO"})
    model = Whole(2)
    with pytest.raises(ValueError, match="Native DeepSpeed MoE is not supported with ZeRO Stage 3"):
        start(usual, 3, 2)
    with pytest.raises(ValueError, match="(?s)(?=.*fuse_into_backward)(?=.*deepspeed.initialize)"):
        ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters()))
    with pytest.raises(ValueError, match="^tensor_parallel.partition_config"):
        start(usual, 1, 2, **divided)
    with pytest.raises(ValueError, match="(?=.*leave out mpu)(?=.*tensor_parallel.autotp_size)"):
        deepspeed.initialize(model=Whole(2), config=config, mpu=sequences)


@mock.patch.object(mappings.deepspeed.comm, "all_gather_into_tensor", gather)
def not_finite(stage: int, tensor: int) -> None:
    """An expert, the second of rank 1, whose gradient is not finite is skipped on all ranks.

    And so is the expert that another rank has in its place.
    """
    engine = start(Run("moe", "adalomo", stage, 2 * tensor, 2, tensor=tensor), stage, 2)
    own, rank = named(engine.module), dist.get_rank()
    before = {n: p.detach().clone() for n, p in own.items()}
    if rank == 1:
        own["layers.0.experts.3.0.weight"].register_hook(lambda g: g / 0)
    engine.backward(loss_of(engine, 0, rank // tensor))
    engine.step()
    same = {n for n, p in own.items() if p.requires_grad and torch.equal(p, before[n])}
    assert same == {f"layers.0.experts.{2 * (rank % 2) + 1}.0.weight"}
    assert engine.optimizer.metrics()["skipped_parameters"] == 1
    assert all(p.isfinite().all() for p in own.values())
