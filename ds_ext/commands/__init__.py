"""The command line ``python -m ds_ext``, with a module for each command."""
