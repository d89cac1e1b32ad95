"""Matrices of training runs over candidates, data sets and learning rates."""
