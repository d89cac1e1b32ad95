"""Random sequences of a user's calls, beside a reference in one process that knows no ds_ext.

``sides.py`` has the model, what a user may do with it and its optimizer, and the reference;
``ways.py`` the ways of stepping by ds_ext; ``calls.py`` the calls; ``driver.py`` compares the two
sides after each call, and makes what it finds short; ``search.py`` runs sequences in processes
that may die. By hand: ``python -m tests.scenarios --minutes 60``.
"""
