"""What fits? The bytes of an optimizer on each rank, computed before a run."""
