"""The passes over memory that optimizers consist of, as methods of one class.

``executors.reference`` runs them in plain torch, which is the specification.
``executors.table_passes`` runs them by native code on a CPU and by kernels on a GPU. Rules call the
functions of the same names in ``functions``.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ds_ext.ops.expressions import Gradient, Number, Quotient, Readable, Writable


class Passes(Protocol):
    """The passes over one geometry: the run of a parameter, or the runs of a batch.

    In a batch, ``Runs`` replace each tensor below, each number may be a vector [n], and the sums of
    all parameters are concatenated. Inputs are tensors and the lazy expressions of ``expressions``
    and ``moments``. ``like`` is a gradient, which gives the device and the dtype of results even if
    the run is empty.
    """

    def square_sums(self, runs: Sequence[Readable], like: Gradient) -> Sequence[Tensor]:
        """Returns the sums of the squares of several runs, [] each; reads shared inputs once."""
        ...

    def row_col_square_sums(self, x: Readable, like: Gradient) -> tuple[Tensor, Tensor]:
        """Returns sums of squares over rows and columns, [mats, rows], [mats, cols].

        Rows and columns outside the run are 0, so summing over ranks gives the sums of the matrix.
        """
        ...

    def weighted_square_sums(
        self, x: Readable, before: Tensor, eps: float, beta: float, like: Gradient
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ``row_col_square_sums``, and column sums of squares divided by their row's v.

        The divisor is the new statistic, beta · ``before`` + (1 − beta) · mean(x² + eps). It is
        known as soon as the row is read, because runs hold whole rows.

        Args:
            x: the run.
            before: row statistics before the step, [mats, rows].
            eps: added to squares.
            beta: the weight of the old statistic.
            like: a gradient.

        Returns:
            [mats, rows], [mats, cols], [mats, cols].
        """
        ...

    def factors_(
        self,
        row: Tensor,
        col: Tensor,
        sums: tuple[Tensor, ...],
        eps: float,
        beta: float,
        clip: float,
    ) -> tuple[Tensor, Tensor]:
        """v ← beta · v + (1 − beta) · mean(x² + eps) for the statistics ``row`` and ``col``.

        v is estimated as row · col / mean(row). An empty matrix has sums of 0.

        Args:
            row: row statistics, [mats, rows], written.
            col: column statistics, [mats, cols], written.
            sums: of x², over all ranks. With the three sums of ``weighted_square_sums``, the
                factors limit RMS(x / sqrt(v)) to ``clip``.
            eps: added to squares.
            beta: the weight of the old statistics.
            clip: the limit.

        Returns:
            Factors of 1 / sqrt(v), [mats, rows, 1] and [mats, 1, cols].
        """
        ...

    def scattered_squares(self, x: Readable, like: Gradient) -> Tensor:
        """Returns the squares of a run at its place in the parameter, 0 elsewhere, [numel]."""
        ...

    def advance_1x1_(
        self, row: Tensor, col: Tensor, squares: Tensor, eps: float, beta: float
    ) -> Tensor:
        """v ← beta · v + (1 − beta) · (x² + eps) for 1 x 1 matrices; returns the sum of x² / v, [].

        The statistics ``row`` and ``col``, [numel, 1], both hold v. ``squares`` are [numel].
        """
        ...

    def own_run(self, v: Tensor) -> Tensor:
        """Returns the run's part of ``v``, a vector over the whole parameter, [len(shard)]."""
        ...

    def lerp_(self, m: Writable, x: Readable, weight: float) -> None:
        """m ← m + weight · (x − m), for a run."""
        ...

    def square_lerp_(self, v: Tensor, x: Readable, eps: float, weight: float) -> None:
        """v ← v + weight · (x² + eps − v), for a run."""
        ...

    def apply_(self, p: Writable, u: Readable, lr: Number, weight_decay: Number) -> None:
        """p ← p · (1 − lr · weight_decay) − lr · u, for a run of weights.

        It is computed as p − lr · (u + weight_decay · p), because the factor 1 − lr · weight_decay
        would have the same rounding error at every step.
        """
        ...

    def unit_quotient(self, x: Readable, like: Gradient) -> Quotient:
        """Returns x as a quotient whose factors are all 1."""
        ...

    def normalize_rows(self, x: Quotient, sums: Tensor, least: Number) -> Quotient:
        """Returns x with rows of norm √cols. Only the factors change; the matrix is not copied.

        Args:
            x: [mats, rows, cols].
            sums: sums of its squares over each row, summed over all ranks, [mats, rows].
            least: the smallest norm that rows are divided by.
        """
        ...

    def normalize_columns(self, x: Quotient, sums: Tensor, least: Number) -> Quotient:
        """Returns x with columns of norm √rows: ``normalize_rows`` by columns."""
        ...

    def normalize_whole_rows(
        self, x: Quotient, least: Number, like: Gradient
    ) -> tuple[Quotient, Tensor]:
        """Returns x as ``normalize_rows`` does, and the column sums of its squares, [mats, cols].

        One pass computes both: a row's norm is known as soon as the row is read, because the run
        has whole rows. The new row factors include ``x.scale``. Factors of other ranks' rows are 0,
        and the sums only include the run.
        """
        ...
