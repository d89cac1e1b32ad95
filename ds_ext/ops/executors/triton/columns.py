"""The columns of the table that a kernel reads, all of them int64: see ``ops.schema``."""

from ds_ext.ops import schema

COLUMNS = [one.name for one in schema.kernel_columns()]
AT = {name: i for i, name in enumerate(COLUMNS)}  # where each lies in a row
NUMBERS = frozenset(one.name for one in schema.kernel_columns() if one.is_number)
# Int64s that may be formulas, and the constants of kernels that these are.
FORMULAS = {"scale": "SCALED", "decay": "DECAYED", "lr": "RATE"}
