"""Passes on GPUs as Triton kernels. Only this folder imports triton."""
