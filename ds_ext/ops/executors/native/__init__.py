"""How do CPUs pass over memory? One C++ file over a table of parameters, and what calls it."""
