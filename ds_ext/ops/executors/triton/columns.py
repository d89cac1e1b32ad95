"""The columns of a kernel's table, all int64: see ``ops.schema``."""

from ds_ext.ops import schema

COLUMNS = [one.name for one in schema.kernel_columns()]
AT = {name: i for i, name in enumerate(COLUMNS)}  # each column's index in a row
NUMBERS = frozenset(one.name for one in schema.kernel_columns() if one.is_number)
# Number columns that may be formulas, and the kernel constant of each such formula.
FORMULAS = {"scale": "SCALED", "decay": "DECAYED", "lr": "RATE"}
