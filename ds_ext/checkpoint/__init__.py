"""The format and files of checkpoints, without DeepSpeed."""
