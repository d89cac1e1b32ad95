"""What a test needs that a machine may lack: where it is there, the test runs, or fails."""

import importlib.util

import pytest

TRITON = importlib.util.find_spec("triton") is not None
triton = pytest.mark.skipif(not TRITON, reason="Triton is not installed")
nvidia = pytest.mark.skipif(
    not TRITON or importlib.util.find_spec("triton.backends.nvidia") is None,
    reason="Triton, or its compiler for NVIDIA, is not installed",
)
