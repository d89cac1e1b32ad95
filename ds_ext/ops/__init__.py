"""How is memory passed over? Tensors and the geometry of runs; nothing here knows of a rule.

``ops.apply_(...)`` and the other passes are reached from here.
"""

from ds_ext.ops import normalize, passes
from ds_ext.ops.normalize import *  # noqa: F403
from ds_ext.ops.passes import *  # noqa: F403

__all__ = [*passes.__all__, *normalize.__all__]  # noqa: PLE0604
