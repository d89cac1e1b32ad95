"""The columns of the table that a kernel reads: a row for each parameter, all of them int64."""

COLUMNS = (
    # geometry: first program; run [start, start + n) of the matrices as they are laid out here,
    # and where the run starts in the parameter; rows and columns of a matrix; row tiles of one
    # matrix, counted from row0 of matrix mat0, and rows of all tiles; whether all is one sum
    *("first", "start", "n", "origin", "rows", "cols", "down", "row0", "mat0", "mats"),
    *("height", "total"),
    # tensors: a gradient or another run; moments, scales of those of 8 bits; a weight and what
    # else is kept of it; what is written; factors of a quotient; the key of noise; statistics as
    # they were; parts of sums
    *("x", "m", "v", "m_scale", "v_scale", "w", "aux", "out"),
    *("row", "col", "key", "before", "part", "part2"),
    # numbers
    *("factor", "bound", "scale", "weight", "beta1", "beta2", "a", "b", "decay", "share", "lr"),
)
AT = {name: i for i, name in enumerate(COLUMNS)}  # where each lies in a row
NUMBERS = frozenset(COLUMNS[COLUMNS.index("factor") :])
