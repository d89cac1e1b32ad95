"""What is saved? The format and files of checkpoints, without DeepSpeed."""
