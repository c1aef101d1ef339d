"""What becomes of two heads' logits: a token's divergence, or dz. One read of both, element by element.

With x, f of the student and of the teacher as in tile.py, M and S of each row,

    log2 p = (x − M)·f − log2 S          log2 q likewise of the teacher          μ = β·q + (1 − β)·p

    forward    KL(q‖p) = Σ q·(ln q − ln p)                         dz = k·g·(p − q)
    reverse    KL(p‖q) = Σ p·(ln p − ln q)                         dz = k·g·p·(ln(p/q) − KL)
    jsd        β·KL(q‖μ) + (1 − β)·KL(p‖μ)                         dz = k·g·(1 − β)·p·(ln(p/μ) − KL(p‖μ))

and k = slope·f. A head against itself gives exactly 0: both logarithms are made by the same operations.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

import triton
import triton.language as tl

from logitless_triton.tile import LN2

__all__ = ["FORWARD", "JSD", "REVERSE", "divergence_dz_kernel", "dz_of", "gap", "mixture_kernel"]

FORWARD, REVERSE, JSD = 0, 1, 2
_FORWARD, _REVERSE = tl.constexpr(FORWARD), tl.constexpr(REVERSE)
_LN2 = tl.constexpr(LN2)


@triton.jit
def _surprise(weight, ratio, share):
    """weight·log2(weight/μ) where ratio is the other's log2 less its own, and share the other's part of μ."""
    # 100: no weight that a sum sees lies that far below the other, and 2^ratio stays finite.
    other = tl.exp2(tl.minimum(ratio, 100.0, propagate_nan=tl.PropagateNan.ALL))
    # Of equal ones exactly 0: 1 − share + share may be off by a rounding, the same in all of a row.
    return tl.where(weight == 0.0, 0.0, -weight * tl.log2(1.0 + share * (other - 1.0)))


@triton.jit
def gap(d, ref_d, FORWARD: tl.constexpr):
    """By how much a's log2 is above b's, from the student's (x − m)·f and the teacher's: of equal heads exactly 0.

    Less 1 each, so that a compiler which fuses the multiplication with what follows it does so to both, or to neither.
    """
    over = (d - 1.0) - (ref_d - 1.0)
    return -over if FORWARD else over


@triton.jit
def dz_of(log_p, log_q, relative, beta, KIND: tl.constexpr):
    """dz over k·g; `relative` is the divergence, in nats, that p's slope is relative to."""
    p = tl.exp2(log_p)
    if KIND == _FORWARD:
        dz = p - tl.exp2(log_q)
    else:
        slope = p * (log_p - log_q) if KIND == _REVERSE else _surprise(p, log_q - log_p, beta)
        dz = tl.where(p == 0.0, 0.0, slope * _LN2 - p * relative)  # log_p or log_q may be −inf
    return dz


@triton.jit
def _row_facts(f_ptr, ref_f_ptr, stats, rows, inside, stride_stats):
    """[ROWS, 1] each: f, M and log2 S of the student, and of the teacher."""
    f = tl.load(f_ptr + rows, mask=inside, other=0.0)[:, None]
    ref_f = tl.load(ref_f_ptr + rows, mask=inside, other=0.0)[:, None]
    M = tl.load(stats + rows, mask=inside, other=0.0)[:, None]
    ref_M = tl.load(stats + stride_stats + rows, mask=inside, other=0.0)[:, None]
    log_s = tl.load(stats + 2 * stride_stats + rows, mask=inside, other=0.0)[:, None]
    ref_log_s = tl.load(stats + 3 * stride_stats + rows, mask=inside, other=0.0)[:, None]
    return f, M, log_s, ref_f, ref_M, ref_log_s


@triton.jit(do_not_specialize=["N", "stride_stats"])
def mixture_kernel(
    held,
    ref_held,
    f_ptr,
    ref_f_ptr,
    stats,
    out,
    N,
    V,
    beta,
    stride_held,
    stride_ref,
    stride_stats,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[2, N] sums over these columns in log2 units: Jensen-Shannon's KL(p‖μ) and KL(q‖μ)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    f, M, log_s, ref_f, ref_M, ref_log_s = _row_facts(f_ptr, ref_f_ptr, stats, rows, inside, stride_stats)
    at = held + rows.to(tl.int64)[:, None] * stride_held
    ref_at = ref_held + rows.to(tl.int64)[:, None] * stride_ref
    mine = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    other = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    for first in range(0, V, BLOCK):
        cols = first + tl.arange(0, BLOCK)[None, :]
        real = inside[:, None] & (cols < V)
        x = tl.load(at + cols, mask=real, other=-float("inf"))
        y = tl.load(ref_at + cols, mask=real, other=-float("inf"))
        log_p = (x - M) * f - log_s
        log_q = (y - ref_M) * ref_f - ref_log_s
        p = tl.where(real, tl.exp2(log_p), 0.0)
        q = tl.where(real, tl.exp2(log_q), 0.0)
        mine += _surprise(p, log_q - log_p, beta)
        other += _surprise(q, log_p - log_q, 1.0 - beta)
    tl.store(out + rows, tl.sum(mine, 1), mask=inside)
    tl.store(out + N + rows, tl.sum(other, 1), mask=inside)


@triton.jit(do_not_specialize=["N", "stride_stats"])
def divergence_dz_kernel(
    held,
    ref_held,
    f_ptr,
    ref_f_ptr,
    stats,
    up_ptr,
    out,
    N,
    V,
    beta,
    stride_held,
    stride_ref,
    stride_stats,
    stride_out,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_TYPE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KIND: tl.constexpr,
):
    """dz [N, V] of a block of columns; the last row of stats is what p's slope is relative to, `up` is k·g."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    real = inside[:, None] & (cols < V)
    f, M, log_s, ref_f, ref_M, ref_log_s = _row_facts(f_ptr, ref_f_ptr, stats, rows, inside, stride_stats)
    x = tl.load(held + rows.to(tl.int64)[:, None] * stride_held + cols, mask=real, other=0.0)
    y = tl.load(ref_held + rows.to(tl.int64)[:, None] * stride_ref + cols, mask=real, other=0.0)
    log_p = (x - M) * f - log_s
    log_q = (y - ref_M) * ref_f - ref_log_s
    relative = tl.load(stats + 4 * stride_stats + rows, mask=inside, other=0.0)[:, None]
    dz = dz_of(log_p, log_q, relative, beta, KIND) * tl.load(up_ptr + rows, mask=inside, other=0.0)[:, None]
    if SOFTCAP:
        dz *= 1.0 - x * x
    tl.store(out + rows.to(tl.int64)[:, None] * stride_out + cols, dz.to(OUT_TYPE), mask=real)
