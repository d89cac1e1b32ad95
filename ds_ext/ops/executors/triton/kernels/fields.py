"""Constants of kernels: ``F.COLS``, the index of a column; ``F.IS_RUN``, a form; ``F.SPLIT``.

Columns of integers are indexed in a row, others in ``t``: see table_access.py. Triton's key of a
compiled kernel lacks what kernels read from a module: see ``KernelConstants``.
"""

import triton.language as tl

from ds_ext.ops import schema

FORM = {name: tl.constexpr(i) for i, name in enumerate(schema.FORMS)}
FORMATS = {name: tl.constexpr(i) for i, name in enumerate(schema.STORAGE)}
_COLUMNS = {name.upper(): tl.constexpr(i) for name, i in {**schema.AT, **schema.ARGUMENT}.items()}
_ALL = {**_COLUMNS, **FORM, **FORMATS}


def __getattr__(name: str) -> tl.constexpr:
    """Returns a constant; raises AttributeError if there is none of this name."""
    if name not in _ALL:
        raise AttributeError(f"kernels have no column, form or format {name}")
    return _ALL[name]
