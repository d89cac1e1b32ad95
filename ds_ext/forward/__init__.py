"""Runs parts of a model's forward pass in pieces, to save the memory of activations."""
