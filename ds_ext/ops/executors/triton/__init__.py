"""The passes as Triton kernels for GPUs: the only folder that imports triton."""
