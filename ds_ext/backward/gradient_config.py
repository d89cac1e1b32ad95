"""Settings of gradients: policy, clipping and buckets, checked when they are made."""

import math
from dataclasses import dataclass

import torch

from ds_ext import hyperparams
from ds_ext.distributed import consensus
from ds_ext.distributed.layout import Layout
from ds_ext.settings import Section

BUCKET_SIZE = 2**24  # elements; DeepSpeed's default of 5e8 is itself 1 GB of bf16
BUCKET_SIZE_ALONE = 2**21  # of one process: larger buckets save little time
# A GPU steps a matrix faster than Python launches its kernels. The default bucket therefore holds a
# layer of a 7B model. It is smaller if the GPU has little free memory.
GPU_BUCKET_BYTES, GPU_SHARE = 2**29, 1 / 32  # the share is of free memory


def gpu_bucket_size(itemsize: int, free: float = math.inf) -> int:
    """Returns the default elements, of ``itemsize`` bytes, of a bucket on GPUs with free bytes."""
    return max(1, int(min(GPU_BUCKET_BYTES, GPU_SHARE * free)) // itemsize)


@dataclass(frozen=True)
class SettingNames:
    """The names of settings and calls in errors and warnings, as the caller writes them."""

    where: str  # the section of the settings of ``Section``; "" for arguments
    policy: str
    clipping: str
    no_clipping: str
    sharded: str  # the setting that keeps gradients
    accumulate: str
    backward: str  # the call that clips exactly
    step: str
    clips: str  # the settings that clip
    norm: str  # where the norm is


CONFIG = SettingNames(
    where="ds_ext",
    policy="ds_ext.gradient_policy",
    clipping="gradient_clipping",
    no_clipping='"gradient_clipping": 0 (HF Trainer: max_grad_norm=0)',
    sharded='"ds_ext": {"gradient_policy": "sharded"}',
    accumulate='gradient_accumulation_steps or "ds_ext": {"gradient_policy": "sharded"}',
    backward="engine.backward(loss), or engine.scale(loss).backward(),",
    step="engine.step()",
    clips='"gradient_clipping" or "ds_ext": {"clip_value"} in the config',
    norm="engine.get_global_grad_norm()",
)
ARGUMENTS = SettingNames(  # of fuse_into_backward
    where="",
    policy="gradient_policy",
    clipping="max_grad_norm",
    no_clipping="max_grad_norm=0",
    sharded='gradient_policy="sharded" of fuse_into_backward',
    accumulate='gradient_policy="sharded" of fuse_into_backward',
    backward=".backward(loss) on the object that fuse_into_backward returned",
    step="optimizer.step()",
    clips="fuse_into_backward(..., max_grad_norm=...) or clip_value",
    norm=".norm of the object that fuse_into_backward returned",
)


@dataclass(frozen=True)
class GradientConfig:
    """How gradients are reduced, kept and clipped. ValueError if settings contradict each other."""

    bucket_size: int | None = None  # elements; None: by device
    policy: str = "fused"
    max_norm: float = 0.0  # 0: not clipped
    max_value: float = 0.0
    clip_mode: str = "exact"
    average: bool = True  # over the ranks, else summed
    accumulate_in: torch.dtype | None = None  # of kept gradients; None: fp32
    measure_updates: bool = False  # the RMS of updates and weights, by group
    has_engine: bool = False  # which ends each backward pass at once, not with the step
    overlap: bool = False  # reduce and step buckets in parallel with backward, two in flight
    setting_names: SettingNames = CONFIG

    def __post_init__(self) -> None:
        values = {
            "gradient_policy": self.policy,
            "clip_mode": self.clip_mode,
            "clip_value": self.max_value,
        }
        names = self.setting_names
        hyperparams.check(Section, values, names.where)
        if type(self.max_norm) not in (int, float) or not 0 <= self.max_norm < math.inf:
            raise ValueError(f"{names.clipping} is {self.max_norm!r}; allowed: a number >= 0.")
        clip_value = hyperparams.dotted(names.where, "clip_value")
        clip_mode = hyperparams.dotted(names.where, "clip_mode")
        if self.max_norm and self.max_value:
            raise ValueError(
                f"{names.clipping} = {self.max_norm} and {clip_value} = {self.max_value} "
                "clip the same gradients: set one of them to 0."
            )
        if self.clip_mode == "previous" and not self.max_norm:
            raise ValueError(f'{clip_mode} = "previous" needs {names.clipping} > 0.')
        if self.clip_mode == "previous" and self.policy == "sharded":
            raise ValueError(
                f'{clip_mode} = "previous" works only if gradients are not kept. Here '
                'gradient_policy is "sharded", which keeps gradients and clips them exactly at no '
                "cost: remove it."
            )
        if self.accumulate_in is not None and self.policy == "fused":
            raise ValueError(
                "data_types.grad_accum_dtype has no effect without kept gradients: remove it, or "
                f"set {names.sharded}."
            )

    def bucket_size_for(self, layout: Layout) -> int:
        """Returns the elements of a bucket, the same on all ranks of a layout.

        By default, a single CPU process uses a bucket no larger than its largest gradient, so the
        bucket needs no extra memory. Such a process sends nothing, but stepping parameters together
        saves host time.
        """
        if self.bucket_size is not None:
            return self.bucket_size
        if layout.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(layout.device)
            widest = max((p.dtype.itemsize for p in layout.names), default=1)
            return gpu_bucket_size(widest, min(consensus.gathered(free, layout.host_group)))
        if layout.world > 1:
            return BUCKET_SIZE
        sizes = [placement.max_padded_numel(p) for p, placement in layout.placement_of.items()]
        return min(BUCKET_SIZE_ALONE, max(sizes, default=1))
