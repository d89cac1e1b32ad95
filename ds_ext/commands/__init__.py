"""What can be asked of ds_ext without a script? A module for each command of the command line."""
