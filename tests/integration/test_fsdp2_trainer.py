"""HF Trainer and accelerate with FSDP2 on two ranks, against one process and the authors' code."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.distributed import DistributedConfig

import ds_ext
from ds_ext.distributed import fully_shard
from ds_ext.optimizer import OPTIMIZERS
from tests import worlds
from tests.common.choose import params
from tests.common.plain import weights
from tests.common.ranks import whole
from tests.integration import trainer_jobs
from tests.integration.own_loops import EPOCHS, LOOPS, ROWS, WARMUP
from tests.integration.test_trainer import build, check_loop, compare, of, reference
from tests.integration.trainer_jobs import BATCH, FREE, STEPS, TIGHT, TWICE, Job, Sequential, data

ODD, EVEN = 67, 68  # tokens of a vocabulary, which two ranks can divide, or not
# What TrainingArguments take for accelerate to apply FSDP2.
FSDP2 = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT",
    },
}


@dataclass(frozen=True)
class Run(Job):
    by: str = "transformers"  # who applies FSDP2, when it loads the model; "accelerate", "nobody"
    is_fused: bool = True

    @property
    def vocab(self) -> int:
        """transformers cuts tied weights twice, which goes wrong with parts of two sizes."""
        return ODD if self.by == "accelerate" else EVEN


RUNS = {
    "adalomo": Run("adalomo", FREE),
    "lomo-default": Run("lomo"),  # Trainer clips to 1.0
    "came-both": Run("came", TIGHT | TWICE, by="accelerate"),
    "lomo-accumulation": Run("lomo", FREE | TWICE, by="accelerate"),
    "lomo-both": Run("lomo", TIGHT | TWICE),
    "adalomo-plain": Run("adalomo", TIGHT, by="accelerate", is_fused=False),
}


def pretend() -> None:
    state = PartialState._shared_state
    assert state["distributed_type"] == DistributedType.MULTI_CPU
    state["distributed_type"] = DistributedType.MULTI_GPU


def trainer_of(folder: str, run: Run, vocab: int = EVEN, **more: Any) -> Sequential:
    """HF Trainer of a run, which saves nothing unless ``more`` says so."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    given = run.all_arguments | (FSDP2 if run.by == "accelerate" else {}) | more
    arguments = TrainingArguments(
        output_dir=f"{folder}/out",
        per_device_train_batch_size=BATCH // (dist.get_world_size() * run.accumulation),
        **given,
    )
    spread = {}
    if run.by == "transformers":
        spread["distributed_config"] = DistributedConfig(fsdp_size=dist.get_world_size())
    assert arguments.device.type == "cpu"
    if run.by == "accelerate":
        pretend()
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/{vocab}", **spread)
    rule = OPTIMIZERS[run.rule]
    return Sequential(
        model=model,
        args=arguments,
        train_dataset=data(),
        optimizer_cls_and_kwargs=(rule, {"lr": run.all_arguments["learning_rate"]}),
        callbacks=[ds_ext.FuseCallback(bucket_size=100)] if run.is_fused else [],
    )


def train(folder: str, name: str) -> dict[str, Any]:
    run = RUNS[name]
    trainer = trainer_of(folder, run, run.vocab)
    trainer.train()
    assert fully_shard.uses_fsdp2(trainer.model)
    return {"after": whole(trainer.model), "log": trainer.state.log_history}


def resume(folder: str, rule: str, kind: str) -> dict[str, Any]:
    """Weights of a run of 6 steps, and of one that goes on from what it saved after 3."""
    run = Run(rule, TIGHT, by="accelerate")
    how = {"fsdp_config": FSDP2["fsdp_config"] | {"state_dict_type": kind}}
    saving = how | {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    unbroken = trainer_of(folder, run, **saving)
    before = whole(unbroken.model)
    unbroken.train()
    broken = trainer_of(folder, run, **saving)
    broken.train(resume_from_checkpoint=f"{folder}/out/checkpoint-3")
    return {"before": before, "unbroken": whole(unbroken.model), "resumed": whole(broken.model)}


def accelerate(folder: str, name: str) -> dict[str, Any]:
    """accelerate's own loop with FSDP2, gradients kept and clipped; states saved and loaded."""
    loop = LOOPS[name]
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    PartialState(cpu=True)
    pretend()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(gradient_accumulation_steps=loop.accumulation, fsdp_plugin=plugin)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/{ODD}")
    optimizer = OPTIMIZERS[loop.rule](model.parameters(), lr=loop.lr)
    scheduler = WarmupDecayLR(optimizer, warmup_max_lr=loop.lr, **WARMUP)
    loader = torch.utils.data.DataLoader(data()[:ROWS], batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    policy = "sharded" if loop.max_norm else "fused"
    fused = ds_ext.fuse_into_backward(
        model, optimizer, bucket_size=5000, max_grad_norm=loop.max_norm, gradient_policy=policy
    )
    norms, rates = [], []
    for epoch in range(EPOCHS):
        if epoch == 1:
            accelerator.save_state(f"{folder}/{name}")
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            for state in optimizer.state.values():
                state["step"] = 0
            accelerator.load_state(f"{folder}/{name}")
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    bound = loop.max_norm or float("inf")
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), bound)))
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    # The two add up the squares in another order.
                    assert math.isclose(fused.norm, norms[-1], rel_tol=1e-12)
                    scheduler.step()
                    rates.append(scheduler.get_last_lr()[0])
    return {"after": whole(model), "norms": norms, "rates": rates}


pytest.importorskip("transformers.distributed", reason="transformers 5 cuts models by FSDP2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("fsdp2")
    for vocab in (ODD, EVEN):
        trainer_jobs.model(vocab).save_pretrained(made / str(vocab))
    return str(made)


@pytest.mark.supports("HF Trainer", stage="fsdp2", optimizer=lambda name: RUNS[name].rule)
@pytest.mark.parametrize("name", params(RUNS, ["adalomo"]))
def test_trainer_equals_one_process(folder, name):
    got, run = worlds.run(2, train, folder, name)[0], RUNS[name]
    after, log = reference(run.rule, run.max_norm, False, vocab=run.vocab)
    compare(got["after"], after, weights(build(vocab=run.vocab)), STEPS)
    assert of(got["log"], "loss") == pytest.approx(of(log, "loss"), rel=1e-3)
    assert of(got["log"], "grad_norm") == pytest.approx(of(log, "grad_norm"), rel=1e-4)
    if run.max_norm:
        assert min(of(log, "grad_norm")) > 1.05 * run.max_norm
    assert of(got["log"], "learning_rate") == pytest.approx(of(log, "learning_rate"))


RESUMED = [(rule, "SHARDED_STATE_DICT") for rule in ("adalomo", "flashadamw")]
RESUMED += [("came", "FULL_STATE_DICT")]


@pytest.mark.supports("HF Trainer's resume", stage="fsdp2", optimizer="rule")
@pytest.mark.parametrize("rule, kind", params(RESUMED, RESUMED[:1]))
def test_a_run_that_is_resumed_goes_on_bit_for_bit(folder, rule, kind):
    for got in worlds.run(2, resume, folder, rule, kind):
        for n, p in got["unbroken"].items():
            assert torch.equal(p, got["resumed"][n]) and not torch.equal(p, got["before"][n]), n


@worlds.on(2)
def test_what_trainer_cannot_do_is_refused_before_a_weight_moves(folder):
    run = Run("lomo", FREE)
    clipping, other = trainer_of(folder, Run("lomo")), trainer_of(folder, run)
    clipping.pop_callback(ds_ext.FuseCallback)
    clipping.add_callback(ds_ext.FuseCallback(gradient_policy="fused"))
    other.optimizer_cls_and_kwargs = (torch.optim.AdamW, {"lr": 1e-3})
    whole = trainer_of(folder, Run("lomo", FREE, by="nobody"))
    for trainer, words in (
        (trainer_of(folder, run, ODD), "lm_head.weight.*tie_word_embeddings"),
        (clipping, "max_grad_norm = 1 would need a second"),
        (whole, "several ranks train a model that FSDP2 has not cut"),
        (other, "(?=.*AdamW).*Only optimizers of ds_ext"),
    ):
        with pytest.raises(TypeError if trainer is other else ValueError, match=words):
            trainer.train()


@pytest.mark.supports(
    "accelerate, your own loop", stage="fsdp2", optimizer=lambda name: LOOPS[name].rule
)
@pytest.mark.parametrize("name", params(LOOPS, ["lomo-both"]))
def test_accelerates_loop_equals_one_process(folder, name):
    check_loop(worlds.run(2, accelerate, folder, name)[0], LOOPS[name])
