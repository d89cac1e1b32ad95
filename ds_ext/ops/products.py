"""Matrix products with fp32 sums, made of bf16 products on GPUs where these take less time.

A bf16 number has 8 significant bits, so the product of two is exact in fp32. Products use a bf16
gradient without conversion. An fp32 number is a sum of bf16 terms: each one holds the next 8 bits.
No global setting of torch is read or changed, except that fp32 products on a GPU follow torch's
TF32 setting where bf16 products are not used.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor

from ds_ext.ops import block_sizes
from ds_ext.ops.expressions import Gradient, Scaled, accumulator
from ds_ext.ops.shard import Block, Shard

BF16 = torch.bfloat16
# The place of a product in a result, and its operands, for a block of a run, its values
# [n, rows, cols], and another operand, [n, ...].
PlacedProduct: TypeAlias = tuple[tuple[slice, slice], Tensor, Tensor]
MakeProduct: TypeAlias = Callable[[Shard, Block, Tensor, Tensor], PlacedProduct]
MAX_BF16_PRODUCTS = 6  # bf16 products of two operands with three terms each


def product(a: Tensor, b: Tensor, terms: int = 3) -> Tensor:
    """Returns a · b in fp32, or in fp64 if an operand is fp64.

    Operands are [m, k] and [k, n], or stacks of them. See ``add_product_`` for ``terms``.
    """
    dtype = accumulator(torch.promote_types(a.dtype, b.dtype))
    out = a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)
    return add_product_(out, a, b, terms, 0.0)


def add_product_(
    out: Tensor, a: Tensor, b: Tensor, terms: int = 3, beta: Tensor | float = 1.0
) -> Tensor:
    """out ← beta · out + a · b, of matrices or of stacks of them; returns ``out``.

    bf16 operands are exact. Others are used in fp32 (fp64 for fp64), or as a sum of ``terms`` bf16
    numbers where these products take less time than one of fp32 numbers: see ``most_products``.

    Args:
        out: [m, n] in fp32, or in fp64 if an operand is fp64, with consecutive columns; or a stack,
            [matrices, m, n], if ``a`` and ``b`` are stacks.
        a: [m, k].
        b: [k, n].
        terms: 1, 2 or 3, for a relative error of each operand's elements of 2**-8, 2**-16 or 2**-24
            at most. Terms below 2**-126 count as 0.
        beta: the factor of ``out``, which is not read if it is the float 0; a tensor has one
            number, or one for each matrix.
    """
    if out.shape != (*a.shape[:-1], b.shape[-1]):  # to which torch would broadcast
        raise ValueError(f"{[*a.shape]} · {[*b.shape]} does not fit into {[*out.shape]}")
    split = sum(x.dtype != BF16 for x in (a, b))
    count = (1, terms, terms * (terms + 1) // 2)[split]
    if out.dtype == torch.float64 or count > most_products(a.device):
        adds, a, b = _scaled_(out, beta), a.to(out.dtype), b.to(out.dtype)
        add = torch.addmm if out.dim() == 2 else torch.baddbmm
        return add(out, a, b, beta=adds, out=out)
    pairs = [
        (x, y)
        for i, x in enumerate(_terms(a, terms))
        for j, y in enumerate(_terms(b, terms))
        if i + j < terms
    ]
    multiply = torch.mm if out.dim() == 2 else torch.bmm
    for x, y in reversed(pairs):  # the small ones first
        put = out.add_ if _scaled_(out, beta) else out.copy_
        put(multiply(x, y, out_dtype=torch.float32))
        beta = 1.0
    return out


def symmetric_product(a: Tensor, b: Tensor, terms: int = 3) -> Tensor:
    """Returns a · b, known to be symmetric, for about 0.6 of a product's operations.

    The result is [n, n], or a stack of such matrices.
    """
    n, dtype = a.shape[-2], accumulator(torch.promote_types(a.dtype, b.dtype))
    out = a.new_empty(*a.shape[:-1], n, dtype=dtype)
    step = max(32, n // 4)
    is_upper = torch.ones(min(step, n), min(step, n), dtype=torch.bool, device=out.device).triu()
    for start in range(0, n, step):
        stop = min(start + step, n)
        cols = slice(start, stop)
        add_product_(out[..., :stop, cols], a[..., :stop, :], b[..., cols], terms, 0.0)
        out[..., cols, :start] = out[..., :start, cols].mT
        square, own = out[..., cols, cols], slice(stop - start)
        # Its halves differ by rounding errors.
        square.copy_(torch.where(is_upper[own, own], square, square.mT))
    return out


def operand(x: Tensor, terms: int) -> Tensor:
    """Returns ``x`` in the form that products of ``terms`` terms need, to convert it only once."""
    is_rounded = x.dtype == torch.float32 and terms == 1 <= most_products(x.device)
    return x.to(BF16) if is_rounded else x


def operand_dtype(g: Gradient) -> torch.dtype:
    """Returns the dtype in which products use a gradient.

    Where bf16 products are fast, bf16 numbers are used as they are stored, unless they have a
    bound: the factor of the gradient then multiplies the product.
    """
    bound = g.bound if isinstance(g, Scaled) else None
    is_stored = g.dtype == BF16 and most_products(g.device) > 0 and bound is None
    return BF16 if is_stored else accumulator(g.dtype)


def summed_products(
    g: Scaled, q: Tensor, shard: Shard, shape: tuple[int, int], of: MakeProduct, terms: int
) -> Tensor:
    """Returns sums of products of ``q`` with the blocks of gradients' runs.

    Args:
        g: the runs of equal matrices, [n, elements], whose factor is a number or has one for each.
        q: the other operands, [n, ...].
        shard: the geometry of a run, in a matrix.
        shape: of a result, which is 0 where no block has a product.
        of: returns the place of a product in the result, and its operands.
        terms: of the other operand, see ``add_product_``.

    Returns:
        The results, [n, *shape].
    """
    dtype, factor, runs = operand_dtype(g), g.factor, cast(Tensor, g.x)
    factor = factor.view(-1, 1, 1) if isinstance(factor, Tensor) else factor
    total = torch.zeros((len(q), *shape), dtype=accumulator(g.dtype), device=q.device)
    for b in shard.blocks(block_sizes.product_limit(q.device)):
        x = runs[:, b.run].view(-1, *b.shape[1:]).to(dtype)
        if g.bound is not None:
            x = (x * factor).clamp_(-g.bound, g.bound)
        (rows, cols), left, right = of(shard, b, x, q)
        add_product_(total[:, rows, cols], left, right, terms)
    is_done = g.bound is not None or isinstance(factor, float) and factor == 1
    return total if is_done else total.mul_(factor)


@dataclass(frozen=True)
class Product:
    """left · right, [rows touched, k] · [k, cols]: a run of a matrix that a pass computes."""

    left: Tensor
    right: Tensor
    first: int  # the row of the whole matrix at which ``left`` starts
    terms: int = 3  # bf16 terms of an operand

    def block(self, b: Block) -> Tensor:
        """Returns block ``b`` of the product."""
        rows = slice(b.rows.start - self.first, b.rows.stop - self.first)
        return product(self.left[rows], self.right[:, b.cols], self.terms).unsqueeze(0)

    def covers(self, shard: Shard) -> bool:
        """Returns whether the product has all elements of a run."""
        rows, has = shard.touched, slice(self.first, self.first + len(self.left))
        is_inside = has.start <= rows.start and rows.stop <= has.stop
        return is_inside and self.right.shape == (self.left.shape[1], shard.cols)


def terms_for(dtype: torch.dtype) -> int:
    """Returns the terms of an operand that is as exact as a gradient of a dtype: 1 for bf16."""
    return 1 if dtype == BF16 else 3


def most_products(device: torch.device) -> int:
    """Returns how many bf16 products take at most the time of one product of fp32 numbers.

    Data-center GPUs since A100 multiply bf16 numbers at least 15 times as fast. Elsewhere the
    number is 0, or 1 on smaller GPUs since Ampere.
    """
    return _most_products_of_gpu(device) if device.type == "cuda" else 0


@functools.cache
def _most_products_of_gpu(device: torch.device) -> int:
    if "dtype" not in torch.ops.aten.mm.overloads():  # before torch 2.8
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 0 if major < 8 else MAX_BF16_PRODUCTS if minor == 0 and major <= 10 else 1


def _scaled_(out: Tensor, by: Tensor | float) -> bool:
    """Multiplies ``out`` by a number, or each matrix by its own; returns whether it is not 0."""
    if isinstance(by, float) and by in (0, 1):
        return by == 1
    out.mul_(by.view(-1, 1, 1) if isinstance(by, Tensor) and by.dim() else by)
    return True


def _terms(x: Tensor, count: int) -> list[Tensor]:
    """bf16 matrices whose sum is ``x``, or nearly so."""
    if x.dtype == BF16:
        return [x]
    terms = [x.to(BF16)]
    for _ in range(count - 1):
        x = x - terms[-1]
        terms.append(x.to(BF16))
    return terms
