"""What the claims of the README are measured with."""
