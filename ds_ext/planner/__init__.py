"""Computes the memory that an optimizer needs on each rank, before a run."""
