"""What can ds_ext do without a script? The command line, with a module for each command."""
