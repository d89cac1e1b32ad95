"""Matrices of training runs: candidates, data, learning rates; each run is a line of JSON."""
