"""The columns of the table that a kernel reads: a row for each parameter, all of them int64."""

GIVEN = 12  # numbers that the formulas of a pass may be made of
COLUMNS = (
    # first program, and which of a launch's kinds of passes this one's are
    *("first", "kind"),
    # geometry: run [start, start + n) of the matrices as they are laid out here,
    # and where the run starts in the parameter; rows and columns of a matrix; row tiles of one
    # matrix, counted from row0 of matrix mat0, and rows of all tiles; whether all is one sum
    *("start", "n", "origin", "rows", "cols", "down", "row0", "mat0", "mats"),
    *("height", "total"),
    # tensors: a gradient or another run; moments, scales of those of 8 bits; a weight and what
    # else is kept of it; what is written; factors of a quotient; the key of noise; statistics as
    # they were; parts of sums
    *("x", "m", "v", "m_scale", "v_scale", "w", "aux", "out"),
    *("row", "col", "key", "before", "part", "part2"),
    # weights as they were written, one of each tile; what tells whether a gradient is good
    *("probe", "found"),
    # numbers
    *("factor", "bound", "scale", "weight", "beta1", "beta2", "a", "b", "decay", "share", "lr"),
    *("most",),  # that is found of a good gradient
    # and those that formulas are made of
    *(f"given{i}" for i in range(GIVEN)),
)
AT = {name: i for i, name in enumerate(COLUMNS)}  # where each lies in a row
NUMBERS = frozenset(COLUMNS[COLUMNS.index("factor") :])
# Numbers that may be formulas, and the constants of kernels that these are.
FORMULAS = {"scale": "SCALED", "decay": "DECAYED", "lr": "RATE"}
