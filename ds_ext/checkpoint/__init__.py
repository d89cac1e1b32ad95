"""The format and files of checkpoints. This package does not depend on DeepSpeed."""
