"""Who makes a pass: kernels and native code where they support it, plain torch everywhere else.

The order of registration is the order of preference: see ``ops.dispatch``.
"""

from ds_ext.ops import dispatch
from ds_ext.ops.executors.lone import LoneKernels
from ds_ext.ops.executors.one_by_one import OneByOne
from ds_ext.ops.executors.reference import Reference
from ds_ext.ops.executors.tables import Tables

_reference = Reference()
for _executor in (Tables(), LoneKernels(), OneByOne(_reference), _reference):
    dispatch.register(_executor)
