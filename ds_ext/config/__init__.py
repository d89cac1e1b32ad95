"""Parses and validates the settings of a DeepSpeed config."""
