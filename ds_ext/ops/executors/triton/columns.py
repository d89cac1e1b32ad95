"""The columns of kernels: see ``ops.schema``.

A launch has a table of int64 with the columns ``TILE``, a row for each parameter. Other columns are
arguments of the launch: a base and an array of offsets for each of ``ADDRESSES``, a number or the
address of a vector for each of ``NUMBERS``.
"""

from ds_ext.ops import schema

_COLUMNS = schema.kernel_columns()
TILE = [one.name for one in _COLUMNS if one.type == "int64_t"]
NUMBERS = [one.name for one in _COLUMNS if one.is_number]
ADDRESSES = [one.name for one in _COLUMNS if one.name not in {*TILE, *NUMBERS}]
# The first argument of each column: the kernel has three before these.
ARGUMENT = {name: 3 + 2 * i for i, name in enumerate(ADDRESSES)}
ARGUMENT |= {name: 3 + 2 * len(ADDRESSES) + i for i, name in enumerate(NUMBERS)}
ARGUMENTS = 3 + 2 * len(ADDRESSES) + len(NUMBERS)  # their number
AT = {name: i for i, name in enumerate(TILE)}  # each column's index in a row
