"""Patches the contexts that partition and gather ZeRO-3's parameters, which belong to no engine.

``zero.Init`` with a config that concerns ds_ext, and ``GatheredParameters`` of parameters that such
a context has partitioned, get a class of their own. It supports 0-d parameters and replica groups,
and waits for collectives that older versions of DeepSpeed do not wait for.
"""

import inspect
from typing import Any

from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init
from torch import Tensor

from ds_ext.config import optimizer_names
from ds_ext.engine import deepspeed_versions, replica_groups
from ds_ext.engine.monkeypatch import Method, replaces
from ds_ext.engine.parameters import as_vectors, deepspeed_parameter


# DeepSpeed partitions among all ranks, or among those that the caller passes.
@replaces(Init, "__init__")
def partition(original: Method, init: Init, *args: Any, **kwargs: Any) -> None:
    """Partitions among ``ds_ext.shard_size`` ranks if the caller passes no group."""
    given = inspect.signature(original).bind_partial(init, *args, **kwargs).arguments
    config = given.get("config_dict_or_path") or given.get("config")
    if not optimizer_names.concerns_us(config):
        original(init, *args, **kwargs)
        return
    init.__class__ = OwnInit
    is_named = given.get("data_parallel_group") or given.get("sequence_data_parallel_group")
    if not is_named and given.get("enabled", True):
        given["data_parallel_group"] = replica_groups.shard_group_for(config, given.get("mpu"))
    original(**given)


class OwnInit(Init):  # type: ignore[misc]  # deepspeed has no types
    """Partitions 0-d parameters, and parameters with replicas."""

    def _zero_init_param(self, param: Tensor) -> None:
        shape = param.shape
        with as_vectors([param]):
            replica_groups.broadcast_to_replicas(param, self.ds_process_group, 0)
            super()._zero_init_param(param)
        deepspeed_parameter(param).ds_shape = shape  # the shape after a gather

    def _allgather_params_coalesced(self, params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        # Before 0.19.8 DeepSpeed waits only for the last of several collectives, but gloo (CPU)
        # completes them in any order.
        one_by_one = not deepspeed_versions.WAITS_FOR_ALL and self.local_device.type == "cpu"
        for some in [[param] for param in params] if one_by_one else [params]:
            super()._allgather_params_coalesced(some, *args, **kwargs)


# DeepSpeed broadcasts an edit among the ranks that partition the parameter, and as bytes.
@replaces(GatheredParameters, "__init__")
def gather(original: Method, gathered: GatheredParameters, *args: Any, **kwargs: Any) -> None:
    """Records the global modifier rank, and gives DeepSpeed its index within each replica group."""
    bound = inspect.signature(original).bind(gathered, *args, **kwargs)
    given = bound.arguments
    if not isinstance(given["params"], Tensor):
        given["params"] = list(given["params"])  # it may be a generator
    params = [given["params"]] if isinstance(given["params"], Tensor) else given["params"]
    size = replica_groups.replicated_shard_size(params)
    if size or any(getattr(param, "ds_shape", None) == () for param in params):
        gathered.__class__ = OwnGatheredParameters
        gathered.modifier_of_all = given.get("modifier_rank") if size else None
        if gathered.modifier_of_all is not None:
            given["modifier_rank"] = gathered.modifier_of_all % size
    original(*bound.args, **bound.kwargs)


class OwnGatheredParameters(GatheredParameters):  # type: ignore[misc]  # deepspeed has no types
    """Ends the gather of 0-d parameters, and of parameters with replicas."""

    def __exit__(self, *error: Any) -> None:
        params = self.params if self.enabled else []
        with as_vectors(params):
            if self.modifier_of_all is not None:
                for param in params:
                    group = deepspeed_parameter(param).ds_process_group
                    replica_groups.broadcast_to_replicas(param, group, self.modifier_of_all)
            super().__exit__(*error)
