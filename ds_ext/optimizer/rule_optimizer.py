"""torch.optim.Optimizer around a rule: param groups, state dicts, and a plain ``step()``."""

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor, nn

from ds_ext import hyperparams, rules
from ds_ext.distributed.consensus import is_first
from ds_ext.distributed.layout import Layout
from ds_ext.logs import logger
from ds_ext.ops.executors import tables, unbatched
from ds_ext.ops.executors.triton import devices
from ds_ext.optimizer import (
    dtensor_state,
    ema_exchange,
    expert_stacks,
    param_checks,
    param_groups,
    plain_step,
    selftest,
    state_checks,
)
from ds_ext.optimizer.bucket_optimizer import BucketOptimizer
from ds_ext.optimizer.model_view import model_view
from ds_ext.optimizer.param_table import checked_hypers, hypers_of, of_this_version
from ds_ext.optimizer.update_stats import UpdateStats

_COPIED = ("update_stats", "stacks", "offload", "numbers", "names")  # in copies and pickles


class RuleOptimizer(BucketOptimizer, torch.optim.Optimizer):
    """Steps every parameter by ``rule``.

    Args:
        params: parameters, or groups of them with their own hyper-parameters.
        **hypers: the fields of the rule's dataclass, and those of
            ``weight_update.RoundingConfig``, which say how weights are rounded.

    Raises:
        TypeError: a hyper-parameter is given by position.
        ValueError: a hyper-parameter is unknown, or has a value that it may not have.
    """

    end_backward: Callable[[], None] | None = None  # ends a step in backward; ``step`` calls it
    before_load: Callable[[], None] | None = None  # ``load_state_dict`` first calls it
    _has_agreed = False  # whether plain steps have agreed on their executor
    instances: ClassVar["weakref.WeakSet[RuleOptimizer]"] = weakref.WeakSet()
    hypers: ClassVar[type]  # the rule, with the fields of ``RoundingConfig`` after its own

    def __init_subclass__(cls) -> None:
        cls.hypers = hypers_of(cls.rule)
        params = inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        types = get_type_hints(cls.hypers)  # without what pydantic checks
        hypers = [
            h.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=types[h.name])
            for h in inspect.signature(cls.hypers).parameters.values()
        ]
        cls.__signature__ = inspect.Signature([params, *hypers])  # type: ignore[attr-defined]

    def __init__(self, params: Iterable[Any], *unnamed: Any, **hypers: Any) -> None:
        if unnamed:
            name = type(self).__name__
            raise TypeError(f"{name} takes hyper-parameters by name: {name}(params, lr=...).")
        if isinstance(params, nn.Module):
            raise TypeError(f"{type(self).__name__}: give model.parameters(), not the model.")
        for key in param_groups.OWN_KEYS:
            if key in hypers and key not in hyperparams.names(self.hypers):
                name = f"{type(self).__name__}.for_model"
                raise TypeError(f"{key} needs the names of a model: {name}(model, {key}=...).")
        BucketOptimizer.__init__(self)
        if not isinstance(params, Tensor):  # which torch refuses
            params = list(params)
            param_checks.refuse_no_params(type(self).__name__, params)
        torch.optim.Optimizer.__init__(self, params, checked_hypers(self.hypers, hypers))
        self.instances.add(self)

    @classmethod
    def for_model(cls, module: nn.Module, *unnamed: Any, **params: Any) -> "RuleOptimizer":
        """Returns an optimizer of a model's trained parameters, as an engine makes it of a config.

        Args:
            module: the model.
            *unnamed: nothing, because hyper-parameters have names.
            **params: "params" of the config's section "optimizer": hyper-parameters, and
                ``param_groups``, ``target_modules`` and ``others`` (docs/settings.md).

        Raises:
            ValueError: a key is unknown or its value is wrong; or ZeRO-3 has partitioned the model.
        """
        if unnamed:
            name = f"{cls.__name__}.for_model"
            raise TypeError(f"{name} takes hyper-parameters by name: {name}(model, lr=...).")
        if not isinstance(module, nn.Module):
            raise TypeError(f"{cls.__name__}.for_model: give the model, not {type(module)}.")
        trained = [p for p in module.parameters() if p.requires_grad]
        if any(p.numel() == 0 for p in trained):
            raise ValueError(
                f"{cls.__name__}.for_model: some trained parameters are empty. If ZeRO-3 has "
                "partitioned the model, it is unknown which are matrices: name the optimizer in "
                "the config of deepspeed.initialize, or make it before. Freeze others."
            )
        entry = rules.named(cls.rule.__name__)
        made = param_groups.of_config(entry, params, model_view(module), trained, "")
        return cls(made.groups, **made.hypers).separate_experts(module)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters; see torch.optim.Optimizer.

        Args:
            param_group: "params", hyper-parameters that differ from the optimizer's, a "name", and
                a "type" if another rule steps the group. That rule has its own defaults, except for
                lr, weight_decay, weight_update, seed, ema_decay and ema_dtype. Other keys are kept
                for code that reads them, such as timm's "lr_scale".

        Raises:
            TypeError: it is no dict, or its parameters are no tensors.
            ValueError: a hyper-parameter is wrong, a key looks like a misspelt one, or a parameter
                cannot be stepped.
        """
        if isinstance(param_group, dict):
            param_group = self._rules.complete(param_group, self.defaults)
        super().add_param_group(param_group)
        for name in self.defaults.keys() - {*hyperparams.names(self.hypers_of(param_group))}:
            del param_group[name]  # super() has put all defaults there
        try:
            self.index_parameters()
        except ValueError:
            del self.param_groups[-1]
            raise

    def separate_experts(
        self,
        module: nn.Module,
        first: Mapping[Tensor, int] | None = None,
        shape: Callable[[Tensor], expert_stacks.Shape] = expert_stacks.plain_shape,
    ) -> "RuleOptimizer":
        """Steps each expert of ``module`` as a separate matrix if one parameter holds many.

        An engine and ``fuse_into_backward`` call it. Call it yourself, before the first step, if
        you use neither.

        Args:
            module: the model; ``expert_stacks.find`` finds the parameters that stack experts.
            first: the number of each parameter's first expert, if ranks hold different experts.
            shape: returns the shape of a whole parameter, which this process may hold a part of.

        Returns:
            The optimizer itself.

        Raises:
            ValueError: such a parameter was stepped as a whole before.
        """
        found = expert_stacks.find(module, shape)
        for param in found - self.stacks.keys():
            if self.state.get(param, {}).get("step") == 0:
                del self.state[param]
        for param in (p for p in found if self.state.get(p)):
            expert_stacks.check_state(type(self).__name__, param, self.state[param], True)
        self.stacks = {p: (first or {}).get(p, 0) for p in found} | self.stacks
        state_checks.make_for_dtensors(self, [p for p in self.group_of if p in found])
        return self

    def agree_on_executor(self, device: torch.device, is_any: Callable[[bool], bool]) -> None:
        """Uses native code or kernels only if they are there, and right, on all ranks.

        Args:
            device: of the parameters.
            is_any: returns whether its argument is True on any rank. All ranks call it.
        """
        has_kernels = device.type in devices.DEVICES
        was_on = devices.supports(device) if has_kernels else tables.supports(device)
        failure = selftest.failure(self, device) if was_on else ""
        if failure:
            logger.warning(failure)
        if is_any(bool(failure) or not was_on) and was_on:
            if not failure and is_first():
                logger.warning("another rank steps by PyTorch's operations, so all ranks do.")
            unbatched.disable_tables(device)
            for optimizer in self.instances:
                optimizer.index_parameters()

    def detach(self, layout: Layout) -> None:
        """Lets a plain step step the parameters again, unless ``fused`` is another layout now."""
        if self.fused is layout:
            self.fused = self.end_backward = self.before_load = None

    def measure_updates(self) -> None:
        """Measures the RMS of updates and weights from the next step on."""
        if self.update_stats is None:
            self.update_stats = UpdateStats(len(self.param_groups))

    def ema(self) -> AbstractContextManager[None]:
        """Context in which the parameters have the moving averages of their values (``ema_decay``).

        For evaluation and export. If the model is stepped inside backward, call
        ``engine.optimizer.ema()``, or ``ema()`` of what ``fuse_into_backward`` has returned.

        Raises:
            ValueError: no group has ``ema_decay``.
            RuntimeError: the model is stepped inside backward, or its parameters are DTensors.
        """
        self.follow_groups()
        if self.fused is not None or self.index.has_dtensors:
            raise RuntimeError(
                "optimizer.ema() is for models that a plain step() trains. Call "
                "engine.optimizer.ema(), or ema() of the object that fuse_into_backward returned."
            )
        return ema_exchange.exchanged(self, None)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have a gradient.

        If they are DTensors, all ranks of their mesh call it, with gradients of the same ones.

        Args:
            closure: computes the loss and its gradients anew, and returns the loss.

        Returns:
            What ``closure`` returned.

        Raises:
            ValueError: a hyper-parameter was set to a value that is not allowed, or a parameter
                cannot be stepped. No weight has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.end_backward is None:
            if not self._has_agreed:
                self._has_agreed = True
                for device in sorted({p.device for p in self.group_of}, key=str):
                    self.agree_on_executor(device, functools.partial(dtensor_state.is_any, self))
            plain_step.step(self)
        else:  # which leaves no gradients
            self.end_backward()
            self.check_param_groups()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        self.refuse_exchanged()
        return super().__getstate__() | {name: getattr(self, name) for name in _COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "index" not in self.__dict__:  # it is a copy, or unpickled
            BucketOptimizer.__init__(self)
        super().__setstate__(state)
        for group in self.param_groups:  # an earlier version may have pickled them
            group.update(of_this_version(group, self.hypers_of(group)))
        self.index_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Returns states and groups as torch's, the states of DTensors as DTensors, and a format.

        All ranks of DTensors call it, because states that cannot be cut like their parameter are
        gathered; an error on one rank is raised on all. The state of a parameter that no group has
        any more is left out.
        """
        saved = dtensor_state.on_all_ranks(self, self._local_state_dict)
        for i in filter(saved["state"].__contains__, range(len(self.params()))):
            saved["state"][i] = dtensor_state.gathered(saved["state"][i])
        return saved

    def _local_state_dict(self) -> dict[str, Any]:
        """Implements ``state_dict`` without communication."""
        self.refuse_exchanged()
        self.follow_groups()
        gone = [p for p in self.state if isinstance(p, Tensor) and p not in self.group_of]
        left = {p: self.state.pop(p) for p in gone}
        saved = super().state_dict() | {"ds_ext": param_checks.FORMAT}
        self.state.update(left)
        for i, param in enumerate(self.params()):
            if i in saved["state"]:
                saved["state"][i] = dtensor_state.saved(self, param, saved["state"][i])
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Overwrites states and hyper-parameters by saved ones, ``weight_update`` among them.

        Differs from torch's: states get the dtypes that their rule declares, so that statistics of
        bf16 weights are fp32. Each rank takes its part of whole states and of DTensors.

        Args:
            state_dict: what ``state_dict()`` returned.

        Raises:
            ValueError: it is the state of another optimizer, or of parameters of other sizes;
                nothing is changed. If parameters are DTensors, all their ranks raise it.
        """
        dtensor_state.on_all_ranks(self, lambda: self._load_state_dict(state_dict))

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Implements ``load_state_dict``."""
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            is_dict = isinstance(state_dict, dict)
            found = [*state_dict][:9] if is_dict else type(state_dict).__name__
            raise ValueError(
                "load_state_dict takes what the optimizer's state_dict() returned, a dict with "
                f'"state" and "param_groups", not {found}.'
            )
        self.refuse_exchanged()
        if self.before_load is not None:
            self.before_load()
        self.follow_groups()
        states: dict[Tensor, dict[str, Any]] = {}

        def prepare(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            groups, found = dtensor_state.on_all_ranks(self, lambda: state_checks.read(self, given))
            ids = itertools.chain(*(group["params"] for group in groups))
            numbers = dict(zip(ids, self.params(), strict=True))
            states.update((numbers[i], state) for i, state in found.items())
            return {**given, "param_groups": groups, "state": {**given["state"], **found}}

        def keep(_: torch.optim.Optimizer) -> None:
            self.state.update(states)

        # The caller's pre-hooks come before these, and the post-hooks after them.
        before = self.register_load_state_dict_pre_hook(prepare)
        after = self.register_load_state_dict_post_hook(keep, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()
