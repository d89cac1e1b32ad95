"""Configs, right and wrong, and what ``deepspeed.initialize`` says of them."""

from functools import partial
from typing import Any, NamedTuple

import deepspeed
from torch import nn

from tests.common.ranks import logged, message

SIZES = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
OURS: dict[str, Any] = {"ds_ext": {}}  # else the config is another optimizer's
RIGHT = {"optimizer": {"type": "AdaLomo", "params": {"lr": 1e-3}}}
SUPER = {"device": "cpu", "super_offload": True}
NVME = {"device": "nvme", "nvme_path": "/x"}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
MISSPELT = {"type": "WarmupLR", "params": {"warmup_step": 2}}
LOWER = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}
EXPERTS = {"expert_parallel": {"enabled": True}}
DECAY = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}
CLIPPED = {"gradient_clipping": 1.0}
FUSED = {"ds_ext": {"gradient_policy": "fused"}}
INT8 = {"ds_ext": {"weight_storage": "int8"}}
KEPT = {"ds_ext": {"gradient_policy": "sharded"}}
PREVIOUS = {"ds_ext": {"clip_mode": "previous"}}
AUTO_TP = {"tensor_parallel": {"autotp_size": 2}}
GATHER = "stage3_gather_16bit_weights_on_model_save"
USUAL = {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}


def zero(stage: Any, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def ours(params: Any, name: str = "AdaLomo") -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


def entries(*groups: dict[str, Any]) -> dict[str, Any]:
    return ours({"param_groups": list(groups)})


def scheduler(name: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": name, "params": params}}


def own(**keys: Any) -> dict[str, Any]:
    return {"ds_ext": keys}


# Changes of a right config, by what ``check`` and a run must say, or by a list of what each line
# must say; None: both accept it.
JUDGED: list[tuple[str | list[str] | None, dict[str, Any]]] = [
    (None, {}),
    (None, zero(3, offload_param={"device": "none"}, **USUAL)),
    # Numbers and booleans as text, which DeepSpeed converts.
    (None, zero("3")),
    (None, zero(3.0)),
    (None, zero("2", reduce_bucket_size="5000")),
    (None, zero(2, reduce_bucket_size=5e3)),
    (None, zero("3", zero_hpz_partition_size="1")),
    (None, zero(3, zero_quantized_nontrainable_weights="false", reduce_scatter="false")),
    (None, {"bf16": {"enabled": "true"}}),
    (None, {"bf16": {"enabled": 1}}),
    (None, {"fp16": {"enabled": "false"}}),
    (None, {"compile": {"deepcompile": "false"}}),
    ("zero_optimization.stage", zero("three")),
    ("zero_optimization.stage", zero(2.5)),
    ("zero_optimization.stage", zero(4)),
    ("zero_optimization.stage", zero(None)),
    ("zero_optimization.stage", zero(True)),
    ("zero_optimization.offload_param.device", zero("3", offload_param=NVME)),
    ("zero_optimization.offload_optimizer.device", zero("2", offload_optimizer=NVME)),
    ("zero_optimization.zero_hpz_partition_size", zero("2", zero_hpz_partition_size="2")),
    ("zero_optimization.reduce_bucket_size", zero(2, reduce_bucket_size="5e3")),
    ("zero_optimization.reduce_bucket_size", zero(2, reduce_bucket_size=0.5)),
    ("zero_optimization.reduce_bucket_size", zero(2, reduce_bucket_size="0")),
    ("zero_optimization.reduce_bucket_size is -1", zero(2, reduce_bucket_size=-1)),
    ("remove it; engine.compile() compiles the model", {"compile": {"deepcompile": "true"}}),
    ("bf16.enabled", {"bf16": {"enabled": 2}}),
    # Sections.
    (None, {"zero_optimization": True}),
    (None, {"zero_optimization": False}),
    # "auto" where neither HF Trainer nor accelerate fills it in.
    ("ds_ext.clip_value is 'auto'", {"ds_ext": {"clip_value": "auto"}}),
    ("ds_ext.chunked_loss is 'auto'", {"ds_ext": {"chunked_loss": "auto"}}),
    ("ds_ext is 'auto'", {"ds_ext": "auto"}),
    ("clip_threshold", ours({"lr": 1e-3, "clip_threshold": "auto"})),
    (None, ours(None)),
    (None, {"ds_ext": None}),
    ("zero_optimization", {"zero_optimization": None}),
    ("zero_optimization", {"zero_optimization": 3}),
    ("optimizer", {"optimizer": None} | OURS),
    ("optimizer", {"optimizer": "AdaLomo"} | OURS),
    ("optimizer", {"optimizer": {"type": None}} | OURS),
    ("optimizer.type is ['AdaLomo']; allowed: a name", {"optimizer": {"type": ["AdaLomo"]}}),
    ("optimizer.params", ours([])),
    ("optimizer.params.lr", ours({"lr": "1e-3"})),
    ("bf16", {"bf16": True}),
    ("fp16", {"fp16": []}),
    ("data_types", {"data_types": None}),
    ("checkpoint", {"checkpoint": None}),
    ("ds_ext", {"ds_ext": []}),
    ("scheduler", {"scheduler": None}),
    ("scheduler.params", {"scheduler": WARMUP | {"params": None}}),
    # What a scheduler refuses when it is made, or at its first step.
    ("scheduler.params: WarmupLR", scheduler("WarmupLR", warmup_max_lr="1e-2")),
    ("WarmupLR cannot be made with them", scheduler("WarmupLR", warmup_num_steps=0)),
    ("it sets a learning rate of -", scheduler("LRRangeTest", lr_range_test_min_lr=-1e-4)),
    ("StepLR cannot be made with them: ZeroDivision", scheduler("StepLR", step_size=0)),
    (None, scheduler("StepLR", step_size=1)),
    ("cycle_momentum", scheduler("OneCycleLR", max_lr=1e-2, total_steps=10)),
    ("no lr for a scheduler", ours({}, "Adafactor") | {"scheduler": WARMUP}),
    ("steps_per_print is 0; allowed: a number > 0", {"steps_per_print": 0}),
    # Settings of ours beside DeepSpeed's optimizer of the same name.
    ('such as "ds_ext.Lion"', ours({"lr": 1e-3, "weight_update": "master"}, "Lion")),
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
    ('DS_EXTS. Did you mean "ds_ext"?', {"DS_EXTS": {"batch_splits": 2}}),
    ("unknown key ds_ext.polcy", {"ds_ext": {"polcy": 1}}),
    ("ds_ext.clip_mode is 'previos'", {"ds_ext": {"clip_mode": "previos"}}),
    ("zero_optimization.stge: Extra", {"zero_optimization": {"stge": 3}}),
    ("bf16.enable: Extra inputs are not permitted. Did", {"bf16": {"enable": True}}),
    ('permitted. Did you mean "gradient_clipping"?', zero(3, gradient_clipping=1.0)),
    ('Did you mean "ds_ext.AdamW"?', {"optimizer": {"type": "ds_ext.AdmW"}}),
    (None, ours({"lr": 10.0})),
    (None, ours({"lr": 1e-2}) | {"scheduler": DECAY}),
    (None, ours({"lr": 5e-3}) | {"scheduler": LOWER}),
    (None, ours({"lr": 1e-2}) | {"scheduler": WARMUP}),
    ('Did you mean "offload_optimizer"?', zero(3, offload_optimiser={"device": "cpu"})),
    ('Did you mean "device"?', zero(3, offload_optimizer={"devic": "cpu"})),
    (f'Did you mean "{GATHER}"?', zero(3, **{GATHER[:-1]: True})),
    ('Did you mean "warmup_num_steps"?', {"scheduler": MISSPELT}),
    ('Did you mean "loss_scale"?', {"fp16": {"loss_scael": 128}}),
    ("zero_quantized_weights = True was removed", zero(3, zero_quantized_weights="true")),
    ("zero_optimization.mics_shard_size = 2 is not supported", zero(3, mics_shard_size=2)),
    ("zero_optimization.zenflow", zero(2, zenflow={"topk_ratio": 0.1})),
    ("super_offload = True is not supported: remove it", zero(3, offload_optimizer=SUPER)),
    (None, zero(2, reduce_scatter=False)),
    ("offload_param.device = 'cpu' works only at", zero(2, offload_param={"device": "cpu"})),
    # The optimizer.
    (None, ours({"lr": 1e-5})),
    (["unknown key optimizer.params.lrr", "params.eps is 1e-08"], ours({"lrr": 1, "eps": 1e-8})),
    (
        ["param_groups[0].lrr", "param_groups[1].type is 'AdaLom'"],
        entries({"match": "a", "lrr": 1}, {"match": "b", "type": "AdaLom"}),
    ),
    ("optimizer.type is 'AdaLom'", {"optimizer": {"type": "AdaLom"}} | OURS),
    ("is imported (--import MODULE)", {"optimizer": {"type": "HeavyBall"}} | OURS),
    ('Did you mean "type"?', entries({"match": "a", "typ": "Lion"})),
    (None, zero(3, offload_optimizer={"device": "cpu"})),
    ("measure_updates is 'true'; allowed: true or", {"ds_ext": {"measure_updates": "true"}}),
    ("weight_update", INT8 | ours({"weight_update": "master"})),
    ("scheduler.type is 'auto'", {"scheduler": {"type": "auto", "params": {}}}),
    (
        "CAME has 3 betas, and OneCycle sets 2",
        {
            "optimizer": {"type": "CAME", "params": {"lr": 1e-3}},
            "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1}},
        },
    ),
    ("autotp_size = 2 does not divide the 1 ranks", AUTO_TP),
    ("ds_ext.chunked_loss = True is not supported", AUTO_TP | own(chunked_loss=True)),
    ("split and heads are not supported", AUTO_TP | ours({"heads": 2}, "ds_ext.Muon")),
    # Sizes, and settings that exclude each other.
    ("train_batch_size is not equal to", {"train_batch_size": 7, "gradient_accumulation_steps": 2}),
    ("ds_ext.shard_size = 2 was removed in ds_ext 1.1", {"ds_ext": {"shard_size": 2}}),
    ("works only at", zero(2, zero_hpz_partition_size=2)),
    ("not supported together", INT8 | {"fp16": {"enabled": True}}),
    ("batch_splits = 2 is not supported together with expert_p", own(batch_splits=2) | EXPERTS),
    ("keeps none", FUSED | {"gradient_accumulation_steps": 2}),
    ("keeps none", FUSED | {"train_batch_size": 2}),
    ("keeps none", FUSED | {"managed_gradient_accumulation": False}),
    ("clip the same", own(clip_value=1.0) | CLIPPED),
    ("gradient_clipping > 0", PREVIOUS),
    ("exactly at no cost", CLIPPED | {"gradient_accumulation_steps": 2} | PREVIOUS),
    ("sharded", {"data_types": {"grad_accum_dtype": "fp32"}}),
    ("DeepSpeed refuses the config", {"wall_clock_breakdown": "x"}),
    ("prescale_gradients", {"prescale_gradients": True, "nebula": {"enabled": True}}),
    # Keys in the wrong section, and keys that DeepSpeed would ignore.
    ('"optimizer.params.lr"', {"optimizer": {"type": "AdaLomo", "lr": 1e-3}}),
    ('"ds_ext.gradient_policy"', ours({"gradient_policy": "sharded"})),
    ('"gradient_clipping"', ours({"max_grad_norm": 1.0})),
    ('"optimizer.params.weight_update"', {"ds_ext": {"weight_update": "nearest"}}),
    # A key of another section is named, not one of the same name in optimizer.params.
    ('"gradient_clipping"', {"optimizer": {"type": "AdaLomo", "max_grad_norm": 1.0}}),
    ('"ds_ext.clip_mode"', {"optimizer": {"type": "AdaLomo", "clip_mode": "exact"}}),
    ('"optimizer.params.lr"', {"optimizer": {"type": "AdaLomo", "learning_rate": 1e-3}}),
    ('"optimizer.params.lr"', own(learning_rate=1e-3)),
    ("optimizer.type is missing", {"optimizer": {"typ": "AdaLomo"}}),
    (
        [
            *("gradient_clipping is", "stage is 'x'", "key gradient_cliping", 'an "batch_splits'),
            'policy is \'x\'; allowed: "fused", "sharded" or null.',
            *("clip_value is -1", "params.lrr", 'an "WarmupLR"'),
            'mean "param_groups"? Known: lr',
        ],
        {
            "gradient_clipping": "1.0",
            "gradient_cliping": 1,
            **zero("x", offload_param={"device": "cpu"}),
            **own(batch_split=2, gradient_policy="x", clip_value=-1),
            **ours({"lrr": 1, "param_group": []}),
            "scheduler": {"type": "WarmUpLR", "params": {}},
        },
    ),
    ("scheduler.type is 'WarmupLRR'", {"scheduler": WARMUP | {"type": "WarmupLRR"}}),
    ('Did you mean "warmup_max_lr"', {"scheduler": WARMUP | {"params": {"warmup_max": 1e-3}}}),
    ("'total_num_steps'", {"scheduler": {"type": "WarmupDecayLR", "params": {}}}),
    ("'T_max'", {"scheduler": {"type": "CosineAnnealingLR", "params": {}}}),
    (None, {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 3}}}),
    # What a run finds when it makes the optimizer.
    ("ema_decay = 0.9 does not support", INT8 | ours({"ema_decay": 0.9})),
    ("weight_storage = 'int8' is a setting of ds_ext, and AdamW is", INT8 | ours({}, "AdamW")),
    (
        ["ds_ext.batch_splits = 2 is a setting", "ds_ext.clip_mode = 'previous' is a setting"],
        own(batch_splits=2, clip_mode="previous") | ours({}, "AdamW"),
    ),
    ("[0].match: '(head' is not a regular expression", entries({"match": "(head", "lr": 1e-4})),
    ("target_modules: '*' is not a regular", ours({"target_modules": ["q", "*"]}, "APOLLO")),
    ("target_modules is []", ours({"target_modules": []}, "APOLLO")),
    ("removed in ds_ext 1.1: list the", entries({"match": "w", "type": "Muon", "split": "auto"})),
    (None, {"checkpoint": {"checkpoint_serialization": 0}}),
    ("writer = {'type': 'fast'} is not supported", {"checkpoint": {"writer": {"type": "fast"}}}),
    ("scheduler.type is", {"scheduler": {"params": {}}}),
    ('optimizer.param. Did you mean "params"?', {"optimizer": {"type": "AdaLomo", "param": {}}}),
    ("not supported together with expert_parallel.", EXPERTS | {"sequence_parallel_size": 2}),
    (None, zero(2, reduce_scatter="auto", overlap_comm="auto")),
    ('Did you mean "lr"?', ours({"learning_rate": 1})),
    ('If "auto" filled', ours({"lr": "auto", "eps": "auto"})),
    ("filled in by nobody", ours({"rank": "auto"}, "APOLLO")),
    ("ds_ext.batch_splits is 0; allowed: a whole number > 0", own(batch_splits=0)),
]
# Each with the words that ``check`` says as an error and a run as a warning.
UNKNOWN: dict[str, dict[str, Any]] = {
    "torch_autocast.enable, which DeepSpeed ignores. Did you": {"torch_autocast": {"enable": 1}},
    'gradient_cliping, which DeepSpeed ignores. Did you mean "g': {"gradient_cliping": 1.0},
    '"ds_ext.gradient_policy"': {"gradient_policy": "sharded"},
    '"gradient_clipping"': {"max_grad_norm": 1.0},
    'max_grad_nrom, which DeepSpeed ignores. Did you mean "g': {"max_grad_nrom": 1.0},
    '"optimizer.params.lr"': {"learning_rate": 1e-3},
    'gradient_clippin, which DeepSpeed ignores. Did you mean "g': {"gradient_clippin": "auto"},
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
        given = {"model": nn.Linear(4, 4), "config": SIZES | RIGHT | changes}
        with logged() as lines:  # any other error is a crash
            error = message(partial(deepspeed.initialize, **given), ValueError, AssertionError)
        found.append(Run(error, lines))
    return found
