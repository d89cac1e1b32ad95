"""Patches the methods that partition and gather ZeRO-3's parameters.

The patches support 0-d parameters, replica groups and partitions in 8 bits. They also wait for
collectives that older versions of DeepSpeed do not wait for.
"""

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init
from torch import Tensor

from ds_ext.backward.int8_weights import expand_int8
from ds_ext.engine import deepspeed_versions, int8_partitions, replica_groups
from ds_ext.engine.monkeypatch import Method, replaces
from ds_ext.engine.parameters import deepspeed_parameter

# 0-d parameters. DeepSpeed 0.19 broadcasts parameters as bytes, which fails for 0-d tensors.


@replaces(DeepSpeedEngine)
def _broadcast_model(original: Method, engine: DeepSpeedEngine) -> None:
    with _as_vectors(engine.module.parameters()):
        original(engine)


@replaces(Init)
def _zero_init_param(original: Method, init: Init, param: Tensor) -> None:
    shape = param.shape
    with _as_vectors([param]):
        replica_groups.broadcast_to_replicas(param, init.ds_process_group, 0)
        original(init, param)
    deepspeed_parameter(param).ds_shape = shape  # the shape after a gather


@replaces(GatheredParameters, "_exit" if hasattr(GatheredParameters, "_exit") else "__exit__")
def _exit(original: Method, gathered: GatheredParameters, *error: Any) -> None:
    params = gathered.params if gathered.enabled else []
    with _as_vectors(params):
        if gathered.modifier_of_all is not None:
            for param in params:
                group = deepspeed_parameter(param).ds_process_group
                replica_groups.broadcast_to_replicas(param, group, gathered.modifier_of_all)
        original(gathered, *error)


# ZeRO-3 among groups of ranks.


@replaces(Init, "__init__")
def cut(original: Method, *args: Any, **kwargs: Any) -> None:
    """Partitions among ``ds_ext.shard_size`` ranks if the caller passes no group."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    is_named = given.get("data_parallel_group") or given.get("sequence_data_parallel_group")
    if not is_named and given.get("enabled", True):
        config = given.get("config_dict_or_path") or given.get("config")
        given["data_parallel_group"] = replica_groups.shard_group_for(config, given.get("mpu"))
    original(**given)


@replaces(GatheredParameters, "__init__")
def gather(original: Method, gathered: GatheredParameters, *args: Any, **kwargs: Any) -> None:
    """Records the global modifier rank, and gives DeepSpeed its index within each replica group."""
    given = inspect.signature(original).bind(gathered, *args, **kwargs).arguments
    if not isinstance(given["params"], Tensor):
        given["params"] = list(given["params"])
    params = given["params"]
    size = replica_groups.replicated_shard_size([params] if isinstance(params, Tensor) else params)
    modifier = given.get("modifier_rank")
    gathered.modifier_of_all = None
    if size and modifier is not None:
        gathered.modifier_of_all, given["modifier_rank"] = modifier, modifier % size
    original(**given)


# Weights stored in 8 bits.


@replaces(Init)
def _all_gather(
    original: Method, init: Init, params: list[Tensor], *args: Any, **kwargs: Any
) -> Any:
    int8_partitions.gather(params)
    return original(init, params, *args, **kwargs)


@replaces(Init)
def _partition_param(original: Method, init: Init, param: Tensor, *args: Any, **given: Any) -> None:
    # DeepSpeed writes to the partition if the gathered values have changed.
    with expand_int8(param if given.get("has_been_updated") else ()):
        original(init, param, *args, **given)


# Before 0.19.8 DeepSpeed waits only for the last of several collectives, but gloo (CPU) completes
# them in any order.


@replaces(Init)
def _allgather_params_coalesced(
    original: Method, init: Init, params: list[Tensor], *args: Any, **kwargs: Any
) -> None:
    one_by_one = not deepspeed_versions.WAITS_FOR_ALL and init.local_device.type == "cpu"
    for some in [[param] for param in params] if one_by_one else [params]:
        original(init, some, *args, **kwargs)


@contextlib.contextmanager
def _as_vectors(params: Iterable[Tensor]) -> Iterator[None]:
    """Context in which 0-d parameters have one dimension."""
    scalars = [p for p in params if p.dim() == 0]
    for param in scalars:
        param.data = param.data.view(1)
    yield
    for param in scalars:
        if param.numel():  # not partitioned within the context
            param.data = param.data.view(())
