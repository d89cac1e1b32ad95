"""What fits? Computes the bytes of an optimizer on each rank before a run."""
