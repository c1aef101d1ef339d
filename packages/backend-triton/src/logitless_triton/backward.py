"""Backward: dz of one block of vocab columns at a time, and its products, by cuBLAS.

    d_hidden = Σ_blocks dz·W        d_weight = dzᵀ·h        d_bias = Σ_n dz        and LoRA's two

A block is as large as `workspace_bytes` allows. Its dz comes from the logits made again, or from what was kept; kept
exponentials are the products' operand themselves (`logitless_triton.kept`).
"""

from __future__ import annotations

from torch import Tensor

from logitless.types import Gradients, Needs, Problem
from logitless_triton.dz import coefficients, dz_from_kept, dz_from_logits
from logitless_triton.kept import DIFFERENCES, EXPONENTIALS, Kept
from logitless_triton.rounding import scale_rows
from logitless_triton.rows import Rows, Work, part
from logitless_triton.several import label_coefficients
from logitless_triton.sums import Sums, matmul, pass_scale

__all__ = ["Grads", "backward", "backward_pass"]

Grads = tuple[Tensor, Tensor | None]
"""Upstream gradients of log_prob [m] or [m, K], and entropy [m]."""


def backward_pass(
    work: Work, rows: Rows, kept: Kept, stats: Tensor, grads: Grads, sums: Sums, at: int, *, consume: bool = False
) -> None:
    """Add the gradients of a block of rows, the tokens from `at` on, to the sums; stats are theirs.

    Args:
        consume: what was kept may be overwritten by its dz.
    """
    valid, dz_scale, first = work.head.valid, pass_scale(work, rows, grads), 0
    sums.begin_pass(dz_scale)
    if kept.mode == EXPONENTIALS:
        _exponential_products(work, rows, kept, grads[0], sums, at)
        first = kept.columns
    elif kept.mode == DIFFERENCES and consume and not sums.scaled:
        dz = kept.values.view(work.operand)
        dz_from_kept(work, rows, kept, stats, grads, dz_scale, 0, dz)
        sums.open(0, kept.columns, 1)
        sums.add(dz, rows, at, 0)
        sums.close(0, kept.columns)
        first = kept.columns
    if first < valid:
        _blocks(work, rows, kept, stats, grads, sums, at, first)
    sums.end_pass(at, at + rows.count)


def _blocks(work: Work, rows: Rows, kept: Kept, stats: Tensor, grads: Grads, sums: Sums, at: int, first: int) -> None:
    """The columns from `first` on, dz of a block at a time, in memory of its own."""
    valid, dz_scale, (g, e) = work.head.valid, sums.dz_scale, grads
    blocks = sums.blocks(rows.count, valid - first, work.item)
    spans = blocks.of_tokens(rows.count)
    buffer = work.empty(min(blocks.tokens, rows.count), blocks.columns, dtype=work.operand)
    middle, coefs = max(first, kept.columns), None
    for start, stop in blocks.of_columns(first, middle) + blocks.of_columns(middle, valid):
        if start >= middle and coefs is None:
            make = coefficients if stats.shape[0] == 4 else label_coefficients
            coefs = make(work, rows, stats, g, e, dz_scale)
        sums.open(start, stop, len(spans))
        for begin, end in spans:
            dz, span, here = buffer[: end - begin, : stop - start], rows.span(begin, end), slice(begin, end)
            if coefs is None:
                upstream = (g[here], None if e is None else e[here])
                dz_from_kept(work, span, kept.span(begin, end), stats[:, here], upstream, dz_scale, start, dz)
            else:
                dz_from_logits(work, span, stats[:, here], coefs[:, here], e is not None, start, dz)
            sums.add(dz, span, at + begin, start)
        sums.close(start, stop)


def _exponential_products(work: Work, rows: Rows, kept: Kept, g: Tensor, sums: Sums, at: int) -> None:
    """d_weight = Eᵀ·(s·h) and d_hidden = s·(E·W) of the kept columns, s = −g·k/Σ E."""
    assert kept.offsets is not None
    body = kept.values
    factors = (g, rows.factor, kept.offsets, work.head.slope)
    sums.open(0, kept.columns, 1)
    if sums.hidden is not None:  # first: it waits for no other kernel
        mine = part(sums.hidden, at, at + rows.count)
        matmul(body, part(work.problem.weight, 0, kept.columns), mine)
        scale_rows(mine, *factors, mine)
    if sums.weight is not None:
        scaled = scale_rows(rows.hidden, *factors, work.empty(*rows.hidden.shape, dtype=work.operand))
        matmul(body.T, scaled, part(sums.weight, 0, kept.columns), accumulate=not sums.unwritten)
    sums.close(0, kept.columns)


def backward(
    problem: Problem,
    stats: Tensor,
    kept: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    needs: Needs,
    grad_buffer: Tensor | None,
) -> Gradients:
    """Gradients for upstream [n] (and [n, K]) gradients; the products of those that nobody needs are not run."""
    work = Work(problem)
    parts = Kept.of(work, kept, work.n) if work.n else Kept()
    # What is overwritten by its dz and is of all columns: one block.
    whole = problem.last and parts.mode == DIFFERENCES and parts.columns == work.head.valid
    sums = Sums(work, needs, grad_buffer, whole=whole)
    if work.n:
        rows = work.rows(0, work.n)
        backward_pass(work, rows, parts, stats, (grad_log_probs, grad_entropy), sums, 0, consume=problem.last)
    return sums.finish()
