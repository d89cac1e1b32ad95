"""What real engines hold against what is planned for them."""

import copy
import gc
import itertools
import time

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_ext.ops import rounding
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.planner import memory as planner
from tests import worlds
from tests.common.choose import pairs, params
from tests.common.plain import mean_step
from tests.unit.test_memory import close, held, shapes_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
REAL_BUCKET = 2**17
QUIET = 0.3  # seconds
# On both sides of PERSIST; halves alike, for DeepSpeed rounds ZeRO-2's runs up to whole parameters.
SIZES = [(256, 256), *[(512, 256), (256, 512)] * 4, (256, 256)]


def network():
    return nn.Sequential(*(nn.Linear(cols, rows) for rows, cols in SIZES))


def alive():
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    return held([*found, *(t.grad for t in found if t.is_leaf and t.grad is not None)])


def settled():
    """``alive`` once gloo's threads let go of what they sent: nothing was freed for a while."""
    least, since = alive(), time.monotonic()
    while time.monotonic() - since < QUIET:
        time.sleep(0.02)
        now = alive()
        if now < least:
            least, since = now, time.monotonic()
    return least


def measure(kind, stage, dtype):
    """Bytes alive on this rank: AdamW's at most, ours between steps."""
    gc.collect()
    gc.freeze()  # what there is now is not looked at
    module = network()
    zero = {"stage": stage, "reduce_bucket_size": REAL_BUCKET}
    params = {"lr": 1e-3, "torch_adam": True} if kind == "adamw" else {}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0}
    config |= {"bf16": {"enabled": dtype == "bf16"}, "zero_optimization": zero}
    config |= {"optimizer": {"type": kind, "params": params}}
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=config
    )
    seen = []

    def look(*_, **__):
        seen.append(settled())

    if kind == "adamw":
        engine.basic_optimizer.register_step_pre_hook(look)
        if stage in (1, 2):  # a gradient has just come, and those before it may still be there
            name = "reduce_independent_p_g_buckets_and_remove_grads"
            reduce = getattr(engine.optimizer, name)
            setattr(engine.optimizer, name, lambda *args: (seen.append(alive()), reduce(*args)))
    for _ in range(2):  # the first step makes the state
        loss = engine(torch.ones(1, 256, dtype=DTYPES[dtype])).float().sum()
        engine.backward(loss)
        del loss
        engine.step()
    if kind != "adamw":
        rounding.noise_table.cache_clear()
        look()
    engine.destroy()
    return max(seen)


class Adapted(nn.Module):
    """Checkpointed blocks of frozen layers with adapters. The model itself uses a shared weight."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        layers = {"base": (16, 16), "down": (16, 2), "up": (2, 16)}
        shared = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*sizes) for name, sizes in layers.items()})
            for _ in range(4)
        )
        for block in self.blocks:
            block["shared"] = shared
            block["base"].requires_grad_(False)
        shared.requires_grad_(False)
        self.tied = shared.weight

    def segment(self, block, x):
        return block["shared"](torch.tanh(block["base"](x) + block["up"](block["down"](x))))

    def forward(self, x):
        x = x @ self.tied
        for block in self.blocks:
            x = checkpoint(self.segment, block, x, use_reentrant=self.reentrant)
        return x.square().sum()


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


RANKS = 2
KINDS = ["adamw", "adalomo", "came", "flashadamw"]  # the first is DeepSpeed's
QUICK = [("adamw", 3, "bf16"), ("adalomo", 0, "fp32")]
CASES = pairs(itertools.product(KINDS, range(4), DTYPES), chosen=QUICK)


@pytest.mark.parametrize("kind, stage, dtype", params(CASES, QUICK))
def test_deepspeed_holds_what_is_planned(kind, stage, dtype):
    shapes = shapes_of(network())
    if kind == "adamw":
        planned = planner.adamw(shapes, stage, RANKS, DTYPES[dtype], REAL_BUCKET).total
    else:  # between steps no gradient is alive
        rule = OPTIMIZERS[kind].hypers()
        ours = planner.optimizer_memory(rule, shapes, stage, RANKS, DTYPES[dtype], REAL_BUCKET)
        planned = ours.total - ours.gradients
    assert close(planned, worlds.once(RANKS, measure, kind, stage, dtype)[0])


@pytest.mark.parametrize("reentrant", params([True, False], [True]))
@worlds.on(RANKS)
def test_a_checkpointed_block_releases_its_frozen_weights(reentrant):
    torch.manual_seed(0)
    model = Adapted(reentrant)
    single = copy.deepcopy(model)
    bases = [block["base"] for block in model.blocks]
    hypers = {"lr": 1e-2, "weight_decay": 0.0}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 16}
    zero |= {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0}
    config |= {"zero_optimization": zero, "optimizer": {"type": "ds_ext.AdamW", "params": hypers}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained(model), config=config)
    optimizer = torch.optim.AdamW(trained(single), **hypers)
    seen, before = [], [p.detach().clone() for p in trained(single)]

    def look(*_):
        if torch._C._current_graph_task_id() != -1:
            seen.append(sum(b.weight.ds_status.name == "AVAILABLE" for b in bases))
            if len(seen) > len(bases):  # DeepSpeed's first pass releases persistent biases too
                assert all(b.bias.ds_status.name == "AVAILABLE" for b in bases)

    for base in bases:
        base.register_forward_pre_hook(look)
    for _ in range(3):
        batches = [torch.randn(3, 16).requires_grad_() for _ in range(dist.get_world_size())]
        engine.backward(engine(batches[dist.get_rank()]))
        engine.step()
        mean_step(optimizer, [single(x) for x in batches])
    with deepspeed.zero.GatheredParameters(trained(model)):
        for got, expected, start in zip(trained(model), trained(single), before, strict=True):
            assert (got - expected).norm() < 1e-5 * (expected - start).norm()
    engine.destroy()
    assert seen == [1] * 12  # that of the block which is recomputed, in each of 3 steps
