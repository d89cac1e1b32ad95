"""Configs that DeepSpeed reads, programs that are wrong, and what they are told."""

import contextlib
import io
import sys
from functools import partial
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import ds_ext
from tests.common.ranks import logged, message

SIZES = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
OURS: dict[str, Any] = {"ds_ext": {}}  # else the config is another optimizer's
RIGHT = {"optimizer": {"type": "AdaLomo", "params": {"lr": 1e-3}}}
# What is wrong in all ways is in ``JUDGED``.
WRONG: dict[str, dict[str, Any]] = {
    "optimizer.type is 'AdaLom'": {"optimizer": {"type": "AdaLom"}},
    "optimizer.params.lrr": {"optimizer": {"type": "AdaLomo", "params": {"lrr": 1}}},
    "DeepSpeedZeroConfig: stge": RIGHT | {"zero_optimization": {"stge": 3}},
    'unknown key optimzer. Did you mean "optimizer"': {"optimzer": RIGHT["optimizer"]},
}

SUPER = {"device": "cpu", "super_offload": True}
NVME = {"device": "nvme", "nvme_path": "/x"}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
PROJECTED = {"ds_ext": {"gradient_policy": "projected"}}
INT8 = {"ds_ext": {"weight_storage": "int8"}}
KEPT = {"ds_ext": {"gradient_policy": "sharded"}}
PREVIOUS = {"ds_ext": {"clip_mode": "previous"}}
USUAL = {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}


def _zero(stage: Any, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def _ours(params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdaLomo", "params": params}}


# Changes of a right config, by the key that ``check`` and a run must name; None: both accept it.
JUDGED: list[tuple[str | None, dict[str, Any]]] = [
    (None, {}),
    (None, _zero(3, offload_param={"device": "none"}, **USUAL)),
    # Numbers and booleans as text, which DeepSpeed converts.
    (None, _zero("3")),
    (None, _zero(3.0)),
    (None, _zero("2", reduce_bucket_size="5000")),
    (None, _zero(2, reduce_bucket_size=5e3)),
    (None, _zero("3", zero_hpz_partition_size="1")),
    (None, _zero(3, zero_quantized_nontrainable_weights="false", reduce_scatter="false")),
    (None, {"bf16": {"enabled": "true"}}),
    (None, {"bf16": {"enabled": 1}}),
    (None, {"fp16": {"enabled": "false"}}),
    (None, {"compile": {"deepcompile": "false"}}),
    ("zero_optimization.stage", _zero("three")),
    ("zero_optimization.stage", _zero(2.5)),
    ("zero_optimization.stage", _zero(4)),
    ("DeepSpeedZeroConfig: stage", _zero(None)),
    ("zero_optimization.stage", _zero(True)),
    ("zero_optimization.offload_param.device", _zero("3", offload_param=NVME)),
    ("zero_optimization.offload_optimizer.device", _zero("2", offload_optimizer=NVME)),
    ("zero_optimization.zero_hpz_partition_size", _zero("2", zero_hpz_partition_size="2")),
    ("zero_optimization.reduce_bucket_size", _zero(2, reduce_bucket_size="5e3")),
    ("zero_optimization.reduce_bucket_size", _zero(2, reduce_bucket_size=0.5)),
    ("DeepSpeedZeroConfig: reduce_bucket_size", _zero(2, reduce_bucket_size="0")),
    ("zero_optimization.reduce_bucket_size is -1", _zero(2, reduce_bucket_size=-1)),
    ("remove it; engine.compile() compiles the model", {"compile": {"deepcompile": "true"}}),
    ("bf16.enabled", {"bf16": {"enabled": 2}}),
    # Sections.
    (None, {"zero_optimization": True}),
    (None, {"zero_optimization": False}),
    # "auto" where neither HF Trainer nor accelerate fills it in.
    ("ds_ext.clip_value is 'auto'", {"ds_ext": {"clip_value": "auto"}}),
    ("ds_ext.chunked_loss is 'auto'", {"ds_ext": {"chunked_loss": "auto"}}),
    ("ds_ext is 'auto'", {"ds_ext": "auto"}),
    (
        "clip_threshold",
        {"optimizer": {"type": "AdaLomo", "params": {"lr": 1e-3, "clip_threshold": "auto"}}},
    ),
    (None, _ours(None)),
    (None, {"ds_ext": None}),
    ("zero_optimization", {"zero_optimization": None}),
    ("zero_optimization", {"zero_optimization": 3}),
    ("optimizer", {"optimizer": None} | OURS),
    ("optimizer", {"optimizer": "AdaLomo"} | OURS),
    ("optimizer", {"optimizer": {"type": None}} | OURS),
    ("optimizer.params", _ours([])),
    ("optimizer.params.lr", _ours({"lr": "1e-3"})),
    ("bf16", {"bf16": True}),
    ("fp16", {"fp16": []}),
    ("data_types", {"data_types": None}),
    ("checkpoint", {"checkpoint": None}),
    ("ds_ext", {"ds_ext": []}),
    ("scheduler", {"scheduler": None}),
    ("scheduler.params", {"scheduler": WARMUP | {"params": None}}),
    # Sizes and numbers that DeepSpeed takes as they are.
    (None, {"gradient_accumulation_steps": 2.0}),
    (None, {"gradient_clipping": None, "scheduler": WARMUP}),
    (None, {"data_types": {"grad_accum_dtype": "half"}} | KEPT),
    ("gradient_accumulation_steps", {"gradient_accumulation_steps": "2"}),
    ("gradient_accumulation_steps", {"gradient_accumulation_steps": 0.5}),
    ("gradient_accumulation_steps", {"gradient_accumulation_steps": True}),
    ("train_batch_size", {"train_batch_size": "1"}),
    ("train_micro_batch_size_per_gpu", {"train_micro_batch_size_per_gpu": None}),
    ("sequence_parallel_size", {"sequence_parallel_size": "1"}),
    ("gradient_clipping", {"gradient_clipping": "1.0"}),
    ("gradient_clipping", {"gradient_clipping": True}),
    ("gradient_clipping", {"gradient_clipping": -0.5}),
    ("data_types.grad_accum_dtype", {"data_types": {"grad_accum_dtype": "FP32"}} | KEPT),
    ("communication_data_type", {"communication_data_type": "fp64"}),
    # Keys that are unknown, that a version removed, or that have no effect.
    ('ds_exts. Did you mean "ds_ext"?', {"ds_exts": {"batch_splits": 2}}),
    ("unknown key ds_ext.polcy", {"ds_ext": {"polcy": 1}}),
    ("ds_ext.clip_mode is 'previos'", {"ds_ext": {"clip_mode": "previos"}}),
    ("DeepSpeedZeroConfig: stge", {"zero_optimization": {"stge": 3}}),
    ('Did you mean "offload_optimizer"?', _zero(3, offload_optimiser={"device": "cpu"})),
    ("zero_quantized_weights = True was removed", _zero(3, zero_quantized_weights="true")),
    ("zero_optimization.mics_shard_size = 2 is not supported", _zero(3, mics_shard_size=2)),
    ("zero_optimization.zenflow", _zero(2, zenflow={"topk_ratio": 0.1})),
    ("super_offload = True is not supported: remove it", _zero(3, offload_optimizer=SUPER)),
    (None, _zero(2, reduce_scatter=False)),
    ("offload_param.device = 'cpu' works only at", _zero(2, offload_param={"device": "cpu"})),
    # The optimizer.
    (None, _ours({"lr": 1e-5})),
    ("unknown key optimizer.params.lrr", _ours({"lrr": 1, "eps": 1e-8})),
    (
        "param_groups[0].type is 'AdaLom'",
        _ours({"param_groups": [{"match": "a", "type": "AdaLom"}]}),
    ),
    ("optimizer.type is 'AdaLom'", {"optimizer": {"type": "AdaLom"}} | OURS),
    ("is imported (--import MODULE)", {"optimizer": {"type": "HeavyBall"}} | OURS),
    ('Did you mean "type"?', _ours({"param_groups": [{"match": "a", "typ": "Lion"}]})),
    (None, _zero(3, offload_optimizer={"device": "cpu"})),
    ('gradient_policy = "projected"', {"ds_ext": {"gradient_policy": "projected"}}),
    ("weight_update", {"ds_ext": {"weight_storage": "int8"}} | _ours({"weight_update": "master"})),
    ("scheduler.type is 'auto'", {"scheduler": {"type": "auto", "params": {}}}),
    # Sizes, and settings that exclude each other.
    ("train_batch_size is not equal to", {"train_batch_size": 7, "gradient_accumulation_steps": 2}),
    ("ds_ext.shard_size = 2 was removed in ds_ext 1.1", {"ds_ext": {"shard_size": 2}}),
    ("works only at", _zero(2, zero_hpz_partition_size=2)),
    ("not supported together", {"ds_ext": {"weight_storage": "int8"}, "fp16": {"enabled": True}}),
    (
        "batch_splits = 2 is not supported together with expert_parallel.enabled",
        {"ds_ext": {"batch_splits": 2}, "expert_parallel": {"enabled": True}},
    ),
    ("keeps none", {"ds_ext": {"gradient_policy": "fused"}, "gradient_accumulation_steps": 2}),
    ("keeps none", {"ds_ext": {"gradient_policy": "fused"}, "train_batch_size": 2}),
    (
        "keeps none",
        {"ds_ext": {"gradient_policy": "fused"}, "managed_gradient_accumulation": False},
    ),
    ("clip the same", {"ds_ext": {"clip_value": 1.0}, "gradient_clipping": 1.0}),
    ("gradient_clipping > 0", PREVIOUS),
    (
        "exactly at no cost",
        {"gradient_clipping": 1.0, "gradient_accumulation_steps": 2} | PREVIOUS,
    ),
    ("sharded", {"data_types": {"grad_accum_dtype": "fp32"}}),
    ("DeepSpeed refuses the config", {"wall_clock_breakdown": "x"}),
    ("prescale_gradients", {"prescale_gradients": True, "nebula": {"enabled": True}}),
    # Keys in the wrong section, and keys that DeepSpeed would ignore.
    ('"optimizer.params.lr"', {"optimizer": {"type": "AdaLomo", "lr": 1e-3}}),
    ('"optimizer.params.clip_threshold"', {"optimizer": {"type": "AdaLomo", "clip_threshold": 2}}),
    ('Did you mean "params"', {"optimizer": {"type": "AdaLomo", "parms": {"lr": 1e-3}}}),
    ('"ds_ext.gradient_policy"', _ours({"gradient_policy": "sharded"})),
    ('"gradient_clipping"', _ours({"max_grad_norm": 1.0})),
    ('"optimizer.params.weight_update"', {"ds_ext": {"weight_update": "nearest"}}),
    ("optimizer.type is missing", {"optimizer": {"typ": "AdaLomo"}}),
    (
        "clip_value is -1",
        {
            "gradient_clipping": "1.0",
            "gradient_cliping": 1,
            "ds_ext": {"batch_split": 2, "gradient_policy": "x", "clip_value": -1},
            **_ours({"lrr": 1, "param_group": []}),
        },
    ),
    ("scheduler.type is 'WarmupLRR'", {"scheduler": WARMUP | {"type": "WarmupLRR"}}),
    ('Did you mean "warmup_max_lr"', {"scheduler": WARMUP | {"params": {"warmup_max": 1e-3}}}),
    ("'total_num_steps'", {"scheduler": {"type": "WarmupDecayLR", "params": {}}}),
    ("'T_max'", {"scheduler": {"type": "CosineAnnealingLR", "params": {}}}),
    (None, {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 3}}}),
    # What a run finds when it makes the optimizer.
    (
        "no parameter of this GaLoreAdamW",
        PROJECTED | {"optimizer": {"type": "GaLoreAdamW", "params": {"rank": None}}},
    ),
    (None, PROJECTED | {"optimizer": {"type": "GaLoreAdamW"}}),
    ("ema_decay = 0.9 does not support", INT8 | _ours({"ema_decay": 0.9})),
    (
        "ds_ext.weight_storage = 'int8' has no effect under AdamW",
        INT8 | {"optimizer": {"type": "AdamW"}},
    ),
    (
        "param_groups[0].match: '(head' is not a regular expression",
        _ours({"param_groups": [{"match": "(head", "lr": 1e-4}]}),
    ),
    (
        "target_modules: '*' is not a regular expression",
        {"optimizer": {"type": "APOLLO", "params": {"target_modules": ["q_proj", "*"]}}},
    ),
    ("target_modules is []", {"optimizer": {"type": "APOLLO", "params": {"target_modules": []}}}),
    (
        "removed in ds_ext 1.1: list the rows",
        _ours({"param_groups": [{"match": "w", "type": "Muon", "split": "auto"}]}),
    ),
    (None, {"checkpoint": {"checkpoint_serialization": 0}}),
    (
        "checkpoint.writer = {'type': 'fast'} is not supported",
        {"checkpoint": {"writer": {"type": "fast"}}},
    ),
    ("scheduler is", {"scheduler": {"params": {}}}),
    (
        "not supported together with expert_parallel.enabled",
        {"expert_parallel": {"enabled": True}, "sequence_parallel_size": 2},
    ),
    (None, _zero(2, reduce_scatter="auto", overlap_comm="auto")),
    ("params.eps is 1e-08", _ours({"eps": 1e-8})),
    ('Did you mean "lr"?', _ours({"learning_rate": 1})),
    ('If "auto" filled', _ours({"lr": "auto", "eps": "auto"})),
    ("filled in by nobody", {"optimizer": {"type": "APOLLO", "params": {"rank": "auto"}}}),
]
# Each with the words that ``check`` says as an error and a run as a warning.
UNKNOWN: dict[str, dict[str, Any]] = {
    'gradient_cliping, which DeepSpeed ignores. Did you mean "g': {"gradient_cliping": 1.0},
    '"ds_ext.gradient_policy"': {"gradient_policy": "sharded"},
    '"gradient_clipping"': {"max_grad_norm": 1.0},
    "data_types.grad_acum_dtype": {"data_types": {"grad_acum_dtype": "bf16"}},
    "activation_checkpointing.profil,": {"activation_checkpointing": {"profil": True}},
}


class Run(NamedTuple):
    """What ``deepspeed.initialize`` says of a config."""

    error: str
    log: list[str]


def judged() -> list[Run]:
    """What ``deepspeed.initialize`` says of each config of ``JUDGED``, then of ``UNKNOWN``."""
    found = []
    for changes in [*(changes for _, changes in JUDGED), *UNKNOWN.values()]:
        error = ""
        with logged() as lines:
            try:
                deepspeed.initialize(model=nn.Linear(4, 4), config=SIZES | RIGHT | changes)
            except (ValueError, AssertionError) as refused:  # any other error is a crash
                error = str(refused)
        found.append(Run(error, lines))
    return found


class Mistakes:
    """Programs that misuse an optimizer, each in its own way."""

    def frozen(self) -> None:
        """Nothing to train under an engine."""
        _engine(nn.Linear(4, 4).requires_grad_(False))

    def fused_frozen(self) -> None:
        """Nothing to train without an engine."""
        model = nn.Linear(4, 4).requires_grad_(False)
        ds_ext.fuse_into_backward(model, ds_ext.AdaLomo(model.parameters()))

    def second(self) -> None:
        """An optimizer beside the engine's."""
        model = nn.Linear(4, 4)
        engine = _engine(model)
        optimizer = ds_ext.AdamW(model.parameters())
        engine.backward(engine(torch.eye(4)).sum())
        optimizer.step()

    def own_step(self) -> None:
        """A step of the engine's own optimizer, which has nothing left to do."""
        model = nn.Linear(4, 4)
        optimizer = ds_ext.AdaLomo(model.parameters())
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(SIZES))[0]
        engine.backward(engine(torch.eye(4)).sum())
        optimizer.step()

    def beside_the_type(self) -> None:
        """An optimizer of torch, and a type in the config."""
        model = nn.Linear(4, 4)
        _engine(model, optimizer=torch.optim.AdamW(model.parameters()))

    def own_beside_the_type(self) -> None:
        """Another optimizer of ds_ext, and a type in the config."""
        model = nn.Linear(4, 4)
        _engine(model, optimizer=ds_ext.Lion(model.parameters()))

    def function(self) -> None:
        """A function that makes an optimizer of ds_ext; the model can be used again."""
        model = nn.Linear(4, 4)
        kind = {"model": model, "optimizer": ds_ext.Lion, "config": SIZES | _zero(3)}
        try:
            deepspeed.initialize(**kind)
        finally:
            assert not model._forward_pre_hooks and not hasattr(model.weight, "ds_tensor")

    def function_with_section(self) -> None:
        """A function that makes another optimizer, and a section for ds_ext."""
        config = SIZES | {"ds_ext": {"batch_splits": 1}}
        deepspeed.initialize(model=nn.Linear(4, 4), optimizer=torch.optim.AdamW, config=config)

    def fused_at_stage_3(self) -> None:
        """A model that ZeRO-3 has partitioned."""
        model = nn.Linear(4, 4)
        engine = _engine(model, _zero(3))
        assert engine.module is model
        ds_ext.fuse_into_backward(model, ds_ext.AdaLomo(model.parameters()))

    def fused_after_an_engine(self) -> None:
        """The same, after its engine has ended."""
        model = nn.Linear(4, 4)
        _engine(model, _zero(3)).destroy()
        ds_ext.fuse_into_backward(model, ds_ext.AdaLomo(model.parameters()))

    def wrong_value(self) -> None:
        """A value of the wrong type in a config without a word of ds_ext."""
        model = nn.Linear(4, 4)
        config = SIZES | {"gradient_clipping": "1.0"}
        optimizer = ds_ext.AdaLomo(model.parameters())
        deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def compiled(self) -> None:
        """A model that torch.compile has wrapped, at stage 3."""
        _engine(torch.compile(nn.Linear(4, 4), backend="eager"), _zero(3))

    def compiled_backward(self) -> None:
        """Compiled autograd."""
        _engine(nn.Linear(4, 4)).compile(backend="eager", compiled_autograd_enabled=True)

    def wrapped(self) -> None:
        """A model in DistributedDataParallel."""
        _engine(nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))

    def shared_memory(self) -> None:
        """A frozen parameter, which the optimizer lacks, in the memory of a trained one."""
        model = nn.Linear(6, 9)
        optimizer = ds_ext.AdaLomo(model.parameters())
        model.frozen = nn.Parameter(model.weight.detach()[:3], requires_grad=False)
        deepspeed.initialize(model=model, optimizer=optimizer, config=dict(SIZES))

    def no_optimizer(self) -> None:
        """A section for ds_ext in a config that names no optimizer, at any stage."""

        def start(stage: int) -> None:
            config = SIZES | _zero(stage) | {"ds_ext": {"batch_splits": 1}}
            deepspeed.initialize(model=nn.Linear(4, 4), config=config)

        (told,) = {message(partial(start, stage)) for stage in range(4)}
        raise ValueError(told)

    def auto_sizes(self) -> None:
        """Batch sizes that HF would fill in."""
        _engine(
            nn.Linear(4, 4), {key: "auto" for key in ("train_batch_size", *SIZES) if "size" in key}
        )

    def auto_clipping(self) -> None:
        """A norm that HF would fill in."""
        _engine(nn.Linear(4, 4), {"gradient_clipping": "auto"})

    def no_type(self) -> None:
        """Hyper-parameters of an optimizer that the config does not name."""
        config = SIZES | _zero(3) | {"optimizer": {"params": {"lr": 1e-3}}}
        deepspeed.initialize(model=nn.Linear(4, 4), config=config)


def _engine(model: nn.Module, changes: Any = None, **given: Any) -> Any:
    config = SIZES | _zero(1) | RIGHT | (changes or {})
    return deepspeed.initialize(model=model, config=config, **given)[0]


def undivided() -> str:
    """The error of copies for groups of ranks that do not divide all."""
    return message(lambda: _engine(nn.Linear(4, 4), _zero(3, zero_hpz_partition_size=2)))


def mistakes() -> dict[str, Run]:
    """What each of ``Mistakes`` is told, by its name."""
    found = {}
    for name, mistake in vars(Mistakes).items():
        if name.startswith("_"):
            continue
        error = ""
        with logged() as lines:
            try:
                mistake(Mistakes())
            except Exception as refused:
                error = f"{type(refused).__name__}: {refused}"
        found[name] = Run(error, lines)
    return found


def summed(stage: int, op: str) -> Any:
    """The weights before and after a step of LOMO, with each way to combine ranks' gradients."""
    torch.manual_seed(1)
    model = nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()
    lomo = {"optimizer": {"type": "LOMO", "params": {"lr": 0.5}}, "gradient_allreduce_op": op}
    engine = deepspeed.initialize(model=model, config=SIZES | _zero(stage) | lomo)[0]
    x = torch.full((2, 4), 1.0 + dist.get_rank())
    engine.backward(engine(x).sum())
    engine.step()
    return before, model.weight.detach().clone()


def shown() -> list[str]:
    """What ``sys.excepthook`` shows of each config of ``WRONG``, as where a script ends."""
    found = []
    for config in WRONG.values():
        with contextlib.redirect_stderr(io.StringIO()) as text:
            try:
                deepspeed.initialize(model=nn.Linear(4, 4), config=SIZES | config)
            except Exception:
                sys.excepthook(*sys.exc_info())
        found.append(text.getvalue())
    return found
