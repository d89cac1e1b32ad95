"""What can ds_ext do without a script? A module for each command of the command line."""
