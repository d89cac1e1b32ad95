"""Passes on CPUs: one C++ file, which reads a table of parameters, and the Python that calls it."""
