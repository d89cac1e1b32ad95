"""Executors of passes: native code and kernels where they support a pass, plain torch elsewhere."""
