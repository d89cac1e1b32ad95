"""Steps of every optimizer, compared with torch's operations: ``python -m ds_ext selftest``.

Several processes do so at once, because each of them compiles kernels for minutes. A rehearsal
checks native code.
"""

from benchmarks.gpu.setting import Rows, Setting
from ds_ext.commands import selftest
from ds_ext.optimizer import OPTIMIZERS


def rows(on: Setting) -> Rows:
    """Checks each optimizer with each dtype, storage and rank."""
    kinds = [OPTIMIZERS[name] for name in on.optimizers or OPTIMIZERS]
    for rows_of_one in selftest.rows_of(kinds, on.device):
        for row in rows_of_one:
            yield "Checks", row
