"""Types of ds_ext for editors and type checkers. Written by `make readme`."""

from collections.abc import Iterable
from typing import Any, Literal

from torch import nn

from ds_ext import contract as contract
from ds_ext.backward.fuse import fuse_into_backward as fuse_into_backward
from ds_ext.backward.int8_weights import expand_int8 as expand_int8
from ds_ext.backward.int8_weights import restore_bf16 as restore_bf16
from ds_ext.backward.int8_weights import store_int8 as store_int8
from ds_ext.checkpoint.manifests import Checkpoint as Checkpoint
from ds_ext.checkpoint.manifests import newest_checkpoint as newest_checkpoint
from ds_ext.errors import CheckpointError as CheckpointError
from ds_ext.errors import LostRankError as LostRankError
from ds_ext.forward.batch_splits import split_batch as split_batch
from ds_ext.forward.chunked_loss import chunk_loss as chunk_loss
from ds_ext.hf import FuseCallback as FuseCallback
from ds_ext.hf import MetricsCallback as MetricsCallback
from ds_ext.optimizer import OPTIMIZERS as OPTIMIZERS
from ds_ext.optimizer import RuleOptimizer as RuleOptimizer
from ds_ext.registration import register as register
from ds_ext.rules import REGISTRY as REGISTRY

__version__: str

class Adafactor(RuleOptimizer):
    """As transformers.Adafactor, flags included (arXiv 1804.04235).

    Args:
        params: parameters, or groups of them.
        lr: only with relative_step=False; 0 steps nothing.
        eps: added to g², least RMS(p).
        clip_threshold: largest RMS of the update.
        decay_rate: beta2 is 1 - t ** decay_rate.
        beta1: momentum; None keeps none.
        weight_decay: decoupled, times the step size.
        scale_parameter: step size relative to RMS(p).
        relative_step: step size from t alone.
        warmup_init: relative step size grows from 1e-6.
        nbits: bits of a moment's element.
        ema_decay: of the moving average of the weights; 0: no average.
        ema_dtype: of the average; "bf16" is rounded stochastically.
        weight_update: rounding of 16-bit weights; others are not rounded.
        seed: of the random bits of "stochastic".
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 0.001),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        nbits: Literal[8, 32] = 32,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
    ) -> None: ...
    @classmethod
    def for_model(
        cls,
        module: nn.Module,
        *,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 0.001),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        nbits: Literal[8, 32] = 32,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
        param_groups: list[dict[str, Any]] = ...,
    ) -> Adafactor: ...

class AdaLomo(RuleOptimizer):
    """Adafactor's update, scaled relative to the RMS of the weights (arXiv 2310.10195).

    Args:
        params: parameters, or groups of them.
        lr: relative to RMS(p).
        eps: added to g², least RMS(p).
        clip_threshold: largest RMS of the update.
        decay_rate: beta2 is 1 - t ** decay_rate.
        weight_decay: decoupled, times lr · RMS(p).
        ema_decay: of the moving average of the weights; 0: no average.
        ema_dtype: of the average; "bf16" is rounded stochastically.
        weight_update: rounding of 16-bit weights; others are not rounded.
        seed: of the random bits of "stochastic".
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.001,
        eps: tuple[float, float] = (1e-30, 0.001),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        weight_decay: float = 0.0,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
    ) -> None: ...
    @classmethod
    def for_model(
        cls,
        module: nn.Module,
        *,
        lr: float = 0.001,
        eps: tuple[float, float] = (1e-30, 0.001),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        weight_decay: float = 0.0,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
        param_groups: list[dict[str, Any]] = ...,
    ) -> AdaLomo: ...

class AdamW(RuleOptimizer):
    """Adam with decoupled weight decay, as torch.optim.AdamW (arXiv 1711.05101).

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay of the averages of g and of g².
        eps: added to the divisor.
        weight_decay: decoupled, times lr.
        nbits: bits of a moment's element.
        min_8bit_size: fewer moments than these stay fp32.
        ema_decay: of the moving average of the weights; 0: no average.
        ema_dtype: of the average; "bf16" is rounded stochastically.
        weight_update: rounding of 16-bit weights; others are not rounded.
        seed: of the random bits of "stochastic".
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.01,
        nbits: Literal[8, 32] = 32,
        min_8bit_size: int = 4096,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
    ) -> None: ...
    @classmethod
    def for_model(
        cls,
        module: nn.Module,
        *,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.01,
        nbits: Literal[8, 32] = 32,
        min_8bit_size: int = 4096,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
        param_groups: list[dict[str, Any]] = ...,
    ) -> AdamW: ...

class APOLLO(RuleOptimizer):
    """Scales the gradient's channels as Adam would scale them (arXiv 2412.05270).

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        rank: dimensions of the projected gradient.
        update_proj_gap: steps between renewals of the projection.
        scale: an update is multiplied by its root.
        scale_type: a factor for each channel, or one for the tensor.
        betas: decay of the averages of R and of R².
        eps: added to the divisor.
        weight_decay: decoupled, times lr.
        seed: of the random bits of "stochastic".
        ema_decay: of the moving average of the weights; 0: no average.
        ema_dtype: of the average; "bf16" is rounded stochastically.
        weight_update: rounding of 16-bit weights; others are not rounded.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.001,
        rank: int = 256,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        scale_type: Literal["channel", "tensor"] = "channel",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06,
        weight_decay: float = 0.0,
        seed: int = 0,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
    ) -> None: ...
    @classmethod
    def for_model(
        cls,
        module: nn.Module,
        *,
        lr: float = 0.001,
        rank: int = 256,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        scale_type: Literal["channel", "tensor"] = "channel",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06,
        weight_decay: float = 0.0,
        seed: int = 0,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        param_groups: list[dict[str, Any]] = ...,
        target_modules: str | list[str] = ...,
        others: dict[str, Any] = ...,
    ) -> APOLLO: ...

class APOLLOMini(RuleOptimizer):
    """APOLLO of rank 1, with one factor for the whole gradient (arXiv 2412.05270).

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        rank: dimensions of the projected gradient.
        update_proj_gap: steps between renewals of the projection.
        scale: an update is multiplied by its root.
        scale_type: a factor for each channel, or one for the tensor.
        betas: decay of the averages of R and of R².
        eps: added to the divisor.
        weight_decay: decoupled, times lr.
        seed: of the random bits of "stochastic".
        ema_decay: of the moving average of the weights; 0: no average.
        ema_dtype: of the average; "bf16" is rounded stochastically.
        weight_update: rounding of 16-bit weights; others are not rounded.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.001,
        rank: int = 1,
        update_proj_gap: int = 200,
        scale: float = 128.0,
        scale_type: Literal["channel", "tensor"] = "tensor",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06,
        weight_decay: float = 0.0,
        seed: int = 0,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
    ) -> None: ...
    @classmethod
    def for_model(
        cls,
        module: nn.Module,
        *,
        lr: float = 0.001,
        rank: int = 1,
        update_proj_gap: int = 200,
        scale: float = 128.0,
        scale_type: Literal["channel", "tensor"] = "tensor",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06,
        weight_decay: float = 0.0,
        seed: int = 0,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        param_groups: list[dict[str, Any]] = ...,
        target_modules: str | list[str] = ...,
        others: dict[str, Any] = ...,
    ) -> APOLLOMini: ...

class CAME(RuleOptimizer):
    """Adafactor with momentum and a confidence factor (arXiv 2307.02047).

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: momentum, g², residual.
        eps: added to g², to the residual.
        clip_threshold: largest RMS of an update before momentum.
        weight_decay: decoupled, times lr.
        nbits: bits of a moment's element.
        ema_decay: of the moving average of the weights; 0: no average.
        ema_dtype: of the average; "bf16" is rounded stochastically.
        weight_update: rounding of 16-bit weights; others are not rounded.
        seed: of the random bits of "stochastic".
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.0002,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        nbits: Literal[8, 32] = 32,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
    ) -> None: ...
    @classmethod
    def for_model(
        cls,
        module: nn.Module,
        *,
        lr: float = 0.0002,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        nbits: Literal[8, 32] = 32,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
        param_groups: list[dict[str, Any]] = ...,
    ) -> CAME: ...

class FlashAdamW(RuleOptimizer):
    """AdamW with moments of 8 bits, companded (arXiv 2602.23349).

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay of the averages of g and of g².
        eps: added to the divisor.
        weight_decay: decoupled, times lr.
        ema_decay: of the moving average of the weights; 0: no average.
        ema_dtype: of the average; "bf16" is rounded stochastically.
        weight_update: rounding of 16-bit weights; others are not rounded.
        seed: of the random bits of "stochastic".
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.01,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
    ) -> None: ...
    @classmethod
    def for_model(
        cls,
        module: nn.Module,
        *,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.01,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
        param_groups: list[dict[str, Any]] = ...,
    ) -> FlashAdamW: ...

class GaLoreAdamW(RuleOptimizer):
    """AdamW on gradients projected to a low rank (arXiv 2403.03507).

    Plain AdamW steps groups with ``rank=None``, and parameters that are not matrices.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        rank: dimensions of the projected gradient; null: plain AdamW.
        update_proj_gap: steps between renewals of the basis.
        scale: of a projected update.
        proj_type: the side projected: std the short one, reverse_std the long one.
        betas: decay of the averages of g and of g².
        eps: null, as the authors': 1e-6, and 1e-8 with 8-bit moments.
        weight_decay: decoupled, times lr.
        correct_bias: divides by 1 - betas ** t.
        nbits: bits of a moment's element.
        min_8bit_size: fewer moments than these stay fp32.
        ema_decay: of the moving average of the weights; 0: no average.
        ema_dtype: of the average; "bf16" is rounded stochastically.
        weight_update: rounding of 16-bit weights; others are not rounded.
        seed: of the random bits of "stochastic".
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.001,
        rank: int | None = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        proj_type: Literal["std", "reverse_std", "left", "right"] = "std",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float | None = None,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        nbits: Literal[8, 32] = 32,
        min_8bit_size: int = 4096,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
    ) -> None: ...
    @classmethod
    def for_model(
        cls,
        module: nn.Module,
        *,
        lr: float = 0.001,
        rank: int | None = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        proj_type: Literal["std", "reverse_std", "left", "right"] = "std",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float | None = None,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        nbits: Literal[8, 32] = 32,
        min_8bit_size: int = 4096,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
        param_groups: list[dict[str, Any]] = ...,
        target_modules: str | list[str] = ...,
        others: dict[str, Any] = ...,
    ) -> GaLoreAdamW: ...

class LAMB(RuleOptimizer):
    """Adam with its update scaled to the norm of the weights (arXiv 1904.00962).

    Args:
        params: parameters, or groups of them.
        lr: relative to the norm of the weights.
        betas: decay of the averages of g and of g².
        eps: added to the divisor.
        weight_decay: a part of the update, before its norm is taken.
        bias_correction: divides by 1 - betas ** t.
        min_coeff: least norm ratio; DeepSpeed's FusedLamb: 0.01.
        max_coeff: largest norm ratio; DeepSpeed's FusedLamb: 10.
        ema_decay: of the moving average of the weights; 0: no average.
        ema_dtype: of the average; "bf16" is rounded stochastically.
        weight_update: rounding of 16-bit weights; others are not rounded.
        seed: of the random bits of "stochastic".
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        min_coeff: float | None = None,
        max_coeff: float | None = None,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
    ) -> None: ...
    @classmethod
    def for_model(
        cls,
        module: nn.Module,
        *,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        min_coeff: float | None = None,
        max_coeff: float | None = None,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
        param_groups: list[dict[str, Any]] = ...,
    ) -> LAMB: ...

class Lion(RuleOptimizer):
    """The sign of a momentum, the same step for every weight (arXiv 2302.06675).

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay in the update, in the stored momentum.
        weight_decay: decoupled, times lr.
        nbits: bits of a moment's element.
        ema_decay: of the moving average of the weights; 0: no average.
        ema_dtype: of the average; "bf16" is rounded stochastically.
        weight_update: rounding of 16-bit weights; others are not rounded.
        seed: of the random bits of "stochastic".
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.0001,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        nbits: Literal[8, 32] = 32,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
    ) -> None: ...
    @classmethod
    def for_model(
        cls,
        module: nn.Module,
        *,
        lr: float = 0.0001,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        nbits: Literal[8, 32] = 32,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
        param_groups: list[dict[str, Any]] = ...,
    ) -> Lion: ...

class LOMO(RuleOptimizer):
    """Gradient descent without state: p ← p(1 − lr·wd) − lr·g (arXiv 2306.09782).

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        weight_decay: decoupled, times lr.
        ema_decay: of the moving average of the weights; 0: no average.
        ema_dtype: of the average; "bf16" is rounded stochastically.
        weight_update: rounding of 16-bit weights; others are not rounded.
        seed: of the random bits of "stochastic".
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.001,
        weight_decay: float = 0.0,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
    ) -> None: ...
    @classmethod
    def for_model(
        cls,
        module: nn.Module,
        *,
        lr: float = 0.001,
        weight_decay: float = 0.0,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
        param_groups: list[dict[str, Any]] = ...,
    ) -> LOMO: ...

class Muon(RuleOptimizer):
    """Momentum with all singular values near 1 (arXiv 2502.16982).

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        momentum: decay of the average of g.
        nesterov: steps by g and the average together.
        weight_decay: decoupled, times lr.
        ns_coefficients: of each step; a single triple, or the last of a list, serves all further steps.
        ns_steps: steps of the Newton-Schulz iteration.
        ns_dtype: of its matrix products; sums are fp32.
        eps: least norm.
        adjust_lr_fn: lr's factor: sqrt(max(1, rows / cols)), or 0.2 · sqrt(max(rows, cols)).
        beta2: NorMuon: divides rows by an RMS that decays at this rate; null: Muon.
        nbits: bits of a moment's element.
        split: rows of each part.
        heads: the number of equal parts, in place of `split`.
        ema_decay: of the moving average of the weights; 0: no average.
        ema_dtype: of the average; "bf16" is rounded stochastically.
        weight_update: rounding of 16-bit weights; others are not rounded.
        seed: of the random bits of "stochastic".
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.001,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_coefficients: tuple[float, float, float] | tuple[tuple[float, float, float], ...] | Literal["polar_express"] = (3.4445, -4.775, 2.0315),
        ns_steps: int = 5,
        ns_dtype: Literal["bf16", "fp32"] = "bf16",
        eps: float = 1e-07,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original",
        beta2: float | None = None,
        nbits: Literal[8, 32] = 32,
        split: tuple[int, ...] | None = None,
        heads: int | None = None,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
    ) -> None: ...
    @classmethod
    def for_model(
        cls,
        module: nn.Module,
        *,
        lr: float = 0.001,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_coefficients: tuple[float, float, float] | tuple[tuple[float, float, float], ...] | Literal["polar_express"] = (3.4445, -4.775, 2.0315),
        ns_steps: int = 5,
        ns_dtype: Literal["bf16", "fp32"] = "bf16",
        eps: float = 1e-07,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original",
        beta2: float | None = None,
        nbits: Literal[8, 32] = 32,
        split: tuple[int, ...] | None = None,
        heads: int | None = None,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
        param_groups: list[dict[str, Any]] = ...,
        target_modules: str | list[str] = ...,
        others: dict[str, Any] = ...,
    ) -> Muon: ...

class SCALE(RuleOptimizer):
    """Gradient descent with normalized rows or columns (arXiv 2506.16659).

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        norm_axis: what is divided by its RMS.
        momentum: its decay rate; 0: none.
        eps: least RMS of a row or column.
        weight_decay: decoupled, times lr.
        split: rows of each part.
        heads: the number of equal parts, in place of `split`.
        ema_decay: of the moving average of the weights; 0: no average.
        ema_dtype: of the average; "bf16" is rounded stochastically.
        weight_update: rounding of 16-bit weights; others are not rounded.
        seed: of the random bits of "stochastic".
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.001,
        norm_axis: Literal["row", "column"] = "row",
        momentum: float = 0.0,
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        split: tuple[int, ...] | None = None,
        heads: int | None = None,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
    ) -> None: ...
    @classmethod
    def for_model(
        cls,
        module: nn.Module,
        *,
        lr: float = 0.001,
        norm_axis: Literal["row", "column"] = "row",
        momentum: float = 0.0,
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        split: tuple[int, ...] | None = None,
        heads: int | None = None,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
        param_groups: list[dict[str, Any]] = ...,
        target_modules: str | list[str] = ...,
        others: dict[str, Any] = ...,
    ) -> SCALE: ...

class SinkGD(RuleOptimizer):
    """Gradient descent with normalized rows and columns, without state (arXiv 2502.06742).

    Args:
        params: parameters, or groups of them.
        lr: learning rate, times alpha.
        iterations: of normalizing rows, then columns.
        alpha: times lr: x has an RMS of 1, larger than Adam's update.
        eps: least norm of a row or column.
        weight_decay: decoupled, times lr · alpha.
        split: rows of each part.
        heads: the number of equal parts, in place of `split`.
        ema_decay: of the moving average of the weights; 0: no average.
        ema_dtype: of the average; "bf16" is rounded stochastically.
        weight_update: rounding of 16-bit weights; others are not rounded.
        seed: of the random bits of "stochastic".
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.001,
        iterations: int = 5,
        alpha: float = 0.05,
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        split: tuple[int, ...] | None = None,
        heads: int | None = None,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
    ) -> None: ...
    @classmethod
    def for_model(
        cls,
        module: nn.Module,
        *,
        lr: float = 0.001,
        iterations: int = 5,
        alpha: float = 0.05,
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        split: tuple[int, ...] | None = None,
        heads: int | None = None,
        ema_decay: float = 0.0,
        ema_dtype: Literal["bf16", "fp32"] = "fp32",
        weight_update: Literal["stochastic", "nearest", "master", "master24"] = "stochastic",
        seed: int = 0,
        param_groups: list[dict[str, Any]] = ...,
        target_modules: str | list[str] = ...,
        others: dict[str, Any] = ...,
    ) -> SinkGD: ...
