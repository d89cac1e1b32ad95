"""The passes of passes.py as a Triton kernel, ``run``, over all parameters of a bucket at once.

A program finds the parameter that its tile belongs to, and makes the passes that are due for it
on [TR, TC] elements of one matrix. What a pass reads is told by constants (``FORM``, dtypes); one
function, ``value_of``, computes it for all passes. Sums are of fp32.
"""

import triton
import triton.language as tl

from ds_ext.ops.executors.triton.kernels.run import run
from ds_ext.ops.executors.triton.kernels.values import FORM
from ds_ext.ops.executors.triton.kernels.weights import HOW

VERSION = tuple(int(x) for x in triton.__version__.split(".")[:2])

__all__ = ["FORM", "HOW", "VERSION", "run", "tl"]
