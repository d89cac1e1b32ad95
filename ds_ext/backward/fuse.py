"""The step inside backward without an engine: one process, or the ranks of a process group."""

from collections.abc import Callable

from torch import Tensor, nn

from ds_ext import contract, logs
from ds_ext.backward import error_texts, gradient_config, int8_weights, owners, startup_log
from ds_ext.backward.buckets import LOADED
from ds_ext.backward.fused_backward import FusedBackward
from ds_ext.distributed import consensus, dtensors, fully_shard
from ds_ext.distributed.groups import Group, everyone, of_ranks, require_group_of_launcher
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import Replicated
from ds_ext.distributed.unsupported_wrappers import refuse_wrapped
from ds_ext.optimizer import RuleOptimizer, param_checks
from ds_ext.settings import ClipMode, PolicyName

# Checks that raise ValueError for a model that cannot be fused; ds_ext.engine adds its own.
REFUSALS: list[Callable[[nn.Module], None]] = [refuse_wrapped]
_NOT_REDUCED = (
    "optimizer.step(): FSDP2 holds gradients that it has not reduced. Call "
    "model.set_requires_gradient_sync(True) before the last micro-batch of a step."
)
_CUT_LATER = (
    "optimizer.step(): fully_shard (FSDP2) has replaced the model's parameters after "
    "fuse_into_backward, so nothing steps them. Call fully_shard first, then make the optimizer of "
    "model.parameters(), then call fuse_into_backward."
)

_OTHERS = (
    "fuse_into_backward: another optimizer steps other parameters of this model. Create one "
    "optimizer with parameter groups of both, or call fuse_into_backward with the modules that "
    "contain the parameters of each. If you no longer need the other optimizer, call .remove() on "
    "the object that fuse_into_backward returned for it."
)


def fuse_into_backward(
    model: nn.Module,
    optimizer: RuleOptimizer,
    group: Group = None,
    bucket_size: int | None = None,
    *,
    max_grad_norm: float = 0.0,
    clip_value: float = 0.0,
    clip_mode: ClipMode = "exact",
    gradient_policy: PolicyName = "fused",
    measure_updates: bool = False,
) -> FusedBackward:
    """Makes ``loss.backward()`` step each parameter as its gradient appears, without an engine.

    Keep calling ``optimizer.step()`` after backward, or ``optimizer.step(closure)``: it ends the
    step. If torch.distributed is initialised, rank 0's weights are sent to all ranks of ``group``
    and gradients are averaged, so do not wrap the model in DDP. A model to which ``fully_shard``
    (FSDP2) was applied stays sharded: each part is stepped as soon as FSDP2 has reduced its
    gradient.

    Args:
        model: the model.
        optimizer: of the model's parameters.
        group: the ranks that train the model; None: all ranks.
        bucket_size: elements of gradients that are averaged and stepped together; by default 2^29
            bytes on a GPU, or 1/32 of its free memory if that is less. On a CPU 2^24, in one
            process 2^21 or the elements of the largest parameter, if these are fewer.
        max_grad_norm: clips by the norm of all gradients. Exact clipping needs ``.backward(loss)``
            of the returned object instead of ``loss.backward()``; it runs the graph backward twice.
        clip_value: bounds the elements of gradients.
        clip_mode: "exact", or "previous" to clip by the norm of the step before. The first step
            is measured, and needs ``.backward(loss)`` too.
        gradient_policy: "fused", or "sharded" to keep gradients in fp32 until ``optimizer.step()``,
            over any number of backward passes, and to clip them then.
        measure_updates: adds the RMS of updates and weights to ``metrics``.

    Returns:
        The object that steps the model. After a step, ``norm`` is the norm of all gradients and
        ``metrics`` has more figures. ``remove()`` undoes the call.
    """
    while type(optimizer).__module__.startswith("accelerate."):  # its wrappers
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    if isinstance(getattr(optimizer, "fused", None), FusedBackward):
        raise TypeError(
            "fuse_into_backward: this is the optimizer of a DeepSpeed engine, which steps inside "
            "backward already: remove the call."
        )
    if not isinstance(model, nn.Module):
        swapped = " The two are swapped." if isinstance(optimizer, nn.Module) else ""
        raise TypeError(
            f"fuse_into_backward(model, optimizer): the model is of {type(model)}; allowed: an "
            f"nn.Module.{swapped}"
        )
    if not isinstance(optimizer, RuleOptimizer):
        raise TypeError(
            f"fuse_into_backward(model, optimizer): the optimizer is of {type(optimizer)}. Only "
            "optimizers of ds_ext, such as ds_ext.AdaLomo(model.parameters()), can step inside "
            "backward. That of a rule of yours, MyRule, is ds_ext.MyRule(model.parameters())."
        )
    if isinstance(group, float | int | str | list | tuple | dict):
        raise TypeError(
            f"fuse_into_backward: group is {group!r}; allowed: a process group that has this rank, "
            "or None. Give max_grad_norm and other settings by name."
        )
    require_group_of_launcher("fuse_into_backward")
    contract.check("torch")
    for refuse in REFUSALS:
        refuse(model)
    param_checks.refuse_shared_memory(model.parameters())
    if bucket_size is not None and (type(bucket_size) is not int or bucket_size < 0):
        raise ValueError(f"bucket_size is {bucket_size!r}; allowed: a whole number >= 0, or None.")
    if gradient_policy is None:
        raise ValueError('gradient_policy is None; allowed: "fused" or "sharded".')
    config = gradient_config.GradientConfig(
        bucket_size,
        gradient_policy,
        max_grad_norm,
        clip_value,
        clip_mode,
        measure_updates=measure_updates,
        overlap=True,
        setting_names=gradient_config.ARGUMENTS,
    )
    logs.show_by_default()
    optimizer.follow_groups()
    is_cut = fully_shard.uses_fsdp2(model)
    if is_cut:
        if int8_weights.is_stored(model):
            raise int8_weights.unsupported("fully_shard (FSDP2)")
        if group is not None:
            raise ValueError(
                "fuse_into_backward: the model's parameters are DTensors, and their mesh sets the "
                "ranks: remove the argument group."
            )
        group = of_ranks(dtensors.ranks_of(model.parameters()))
    devices = sorted({str(p.device) for p in model.parameters()})
    facts = {"optimizer": type(optimizer).__name__, "device count": len(devices)}
    facts |= consensus.facts(model, optimizer)
    steps = [int(state.get("step", 0)) for state in optimizer.state.values()]
    facts["optimizer state"] = {"steps": max(steps, default=0)}
    consensus.require_equal(facts | {"argument": vars(config)}, group)
    param_checks.refuse_all_frozen(optimizer)
    if len(devices) > 1:
        raise ValueError(
            f"fuse_into_backward: the model's parameters are on {', '.join(devices)}. Move the "
            "model to one device, or do not call fuse_into_backward: optimizer.step() after "
            "backward supports several devices."
        )
    layout = fully_shard.FSDP2Layout(model, group) if is_cut else _whole_layout(model, group)
    trained = [p for p in model.parameters() if p.requires_grad]
    for older in owners.of(trained):
        if older.optimizer.group_of.keys().isdisjoint(optimizer.group_of):
            raise ValueError(_OTHERS)
    owners.take_over(trained, group)
    layout.broadcast(model)
    optimizer.separate_experts(model)
    fused = FusedBackward(model, optimizer, layout, config, is_boundary=layout.brings_gradients)
    warnings = [*startup_log.warnings(optimizer, layout, is_config=False)]
    if layout.rank == 0:
        where = "parts of fully_shard" if is_cut else "without DeepSpeed"
        logs.show(startup_log.line(optimizer, layout, config, where))
        for warning in warnings:
            logs.logger.warning(warning)

    def end_step() -> None:
        fused.check_owner()
        if layout.has_kept():
            raise RuntimeError(_NOT_REDUCED)
        has_batch = fused.is_begun
        fused.finish(ends_step=True)
        found = fused.end_step()
        if found is not None and not has_batch:
            logs.warn_once(error_texts.WITHOUT_BATCH.format(names=fused.names))
        if found is None and not is_cut and fully_shard.uses_fsdp2(model):
            raise RuntimeError(_CUT_LATER)

    def before_load() -> None:
        if fused.state.used_up and layout.rank == 0:
            logs.logger.warning(error_texts.LOADED)
        fused.buckets.note(LOADED)

    optimizer.end_backward, optimizer.before_load = end_step, before_load
    return fused


def _whole_layout(model: nn.Module, group: Group) -> Layout:
    """The layout of a model that is replicated on every rank of ``group``."""
    placement = Replicated(group or everyone())
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return Layout(placement.group, names, lambda param: placement)
