"""The passes of functions.py as one Triton kernel, ``run``, over all parameters of a bucket.

A program finds the parameter of its tile, and runs the pass on [TR, TC] elements of one matrix.
Constants (``FORM``, dtypes) select the input of a pass; ``value_of`` computes the input for all
passes. Sums are in fp32. ``encode`` and ``decode`` store weights in 8 bits, and read them.
"""

import triton
import triton.language as tl

from ds_ext.ops.executors.triton.kernels.fields import FORM, FORMATS
from ds_ext.ops.executors.triton.kernels.int8 import decode, encode
from ds_ext.ops.executors.triton.kernels.run import run

VERSION = tuple(int(x) for x in triton.__version__.split(".")[:2])

__all__ = ["FORM", "FORMATS", "VERSION", "decode", "encode", "run", "tl"]
