"""Executors of passes: kernels and native code where they support a pass, plain torch elsewhere.

They are registered in order of preference: see ``ops.dispatch``.
"""

from ds_ext.ops import dispatch
from ds_ext.ops.executors.batched import BatchedExecutor
from ds_ext.ops.executors.one_by_one import OneByOne
from ds_ext.ops.executors.reference import Reference
from ds_ext.ops.executors.single import SingleKernels

_reference = Reference()
for _executor in (BatchedExecutor(), SingleKernels(), OneByOne(_reference), _reference):
    dispatch.register(_executor)
