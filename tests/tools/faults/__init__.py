"""The faults that `python -m tests.tools.plant_faults` plants, by what they break."""

from tests.tools.faults import backward, engine, numerics, ranks

FAULTS = (*numerics.FAULTS, *ranks.FAULTS, *backward.FAULTS, *engine.FAULTS)
