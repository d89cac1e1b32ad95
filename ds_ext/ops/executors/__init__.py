"""Executors of passes: kernels and native code where they support a pass, plain torch elsewhere.

They are registered by the geometry of passes, in order of preference: see ``ops.dispatch``.
"""

from types import NoneType

from ds_ext.ops import dispatch
from ds_ext.ops.executors.batched import BatchedExecutor
from ds_ext.ops.executors.reference import Reference
from ds_ext.ops.executors.single import SingleKernels
from ds_ext.ops.executors.table_batch import TableBatch
from ds_ext.ops.shard import Shard

_reference = Reference()
dispatch.register(TableBatch, BatchedExecutor())
dispatch.register(Shard, SingleKernels(), _reference)
dispatch.register(NoneType, BatchedExecutor(), _reference)  # flat tensors
