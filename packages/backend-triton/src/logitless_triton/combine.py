"""Tiles' (or ranks') partial statistics to a token's scores, in a fixed order.

    M = max_t m_t      S = Σ_t 2^((m_t − M)·f)·s_t      T = Σ_t 2^((m_t − M)·f)·(t_t + (m_t − M)·f·s_t)

    log_prob = ((x_label − M)·f − log2 S)·ln 2          entropy = (log2 S − T/S)·ln 2

T is relative to M, not Σ p·z: that loses four digits when logits share an offset of 1e4. The label's x comes from a
dot of its own; where p(label) > 1/2 the label is the row's maximum and M itself is taken, which was summed in the
same order as the normaliser: 1 − p of confident tokens then keeps its digits.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

import math

import triton
import triton.language as tl

from logitless_triton.kept import SHIFT
from logitless_triton.tile import FLOOR, LN2, LOWEST, ceil_div, factor_args, factor_of, tanh

__all__ = ["combine", "label_logits"]

_LN2, _SHIFT = tl.constexpr(LN2), tl.constexpr(SHIFT)
ROWS, TILES = 16, 128  # of a program, measured on an H200; the order of the sums depends on them


@triton.jit(do_not_specialize=["N"])
def _label_kernel(
    h,
    w,
    bias,
    lora_u,
    lora_b,
    label_ptr,
    out_ptr,
    f_ptr,
    f_value,
    reference_ptr,
    N,
    V,
    D,
    R,
    pre,
    stride_hn,
    stride_hd,
    stride_wv,
    stride_wd,
    stride_un,
    stride_ur,
    stride_bv,
    stride_br,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BR: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEGATE: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    label = tl.load(label_ptr + rows, mask=rows < N, other=-1)
    inside = (label >= 0) & (label < V)
    offs = tl.arange(0, BLOCK)
    acc = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    for k in range(0, D, BLOCK):
        mask = inside[:, None] & (offs < D - k)[None, :]  # no load through another rank's label
        a = tl.load(h + rows[:, None] * stride_hn + (k + offs)[None, :] * stride_hd, mask=mask, other=0.0)
        b = tl.load(w + label[:, None] * stride_wv + (k + offs)[None, :] * stride_wd, mask=mask, other=0.0)
        acc += a.to(tl.float32) * b.to(tl.float32)
    x = tl.sum(acc, 1)  # [ROWS]
    if lora_u is not None:
        rs = tl.arange(0, BR)
        mask = inside[:, None] & (rs < R)[None, :]
        a = tl.load(lora_u + rows[:, None] * stride_un + rs[None, :] * stride_ur, mask=mask, other=0.0)
        b = tl.load(lora_b + label[:, None] * stride_bv + rs[None, :] * stride_br, mask=mask, other=0.0)
        x += tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)
    if bias is not None:
        x += tl.load(bias + label, mask=inside, other=0.0).to(tl.float32)
    if SOFTCAP:
        x = tanh(x * pre)
    elif NEGATE:
        x = -x
    x = tl.where(inside, x, -float("inf"))
    tl.store(out_ptr + rows, x, mask=rows < N)
    if reference_ptr is not None:
        f = tl.maximum(factor_of(f_ptr, f_value, rows, rows < N, ROWS), 1e-30)
        tl.store(reference_ptr + rows, x + _SHIFT / f, mask=rows < N)


def label_logits(rows, head, out, reference=None, *, interpreted: bool) -> None:
    """x of each row's label into out [m]; −inf where the label is another rank's.

    Args:
        reference: [m] takes the x relative to which exponentials are kept.
    """
    if rows.count:
        rank = triton.next_power_of_2(max(head.rank, 1))
        width = 32 if interpreted else 1  # the interpreter's time goes by programs
        _label_kernel[(ceil_div(rows.count, width),)](
            rows.hidden,
            head.weight,
            head.bias,
            rows.lora_u,
            head.lora_b,
            rows.labels,
            out,
            *factor_args(rows.factor),
            reference,
            rows.count,
            head.valid,
            head.hidden_size,
            head.rank,
            head.pre,
            *rows.hidden.stride(),
            *head.weight.stride(),
            *rows.lora_strides,
            *head.lora_strides,
            ROWS=width,
            BLOCK=1024,
            BR=rank,
            SOFTCAP=head.softcap,
            NEGATE=head.negate,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["N", "TILES", "stride_stats"])
def _combine_kernel(
    parts,
    label_ptr,
    f_ptr,
    f_value,
    stats,
    log_prob_ptr,
    entropy_ptr,
    N,
    TILES,
    stride_kind,
    stride_tile,
    stride_stats,
    top_entropy,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    FINISH: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < N
    f = factor_of(f_ptr, f_value, offs, inside, BLOCK)
    M = tl.full((BLOCK,), LOWEST, tl.float32)
    S = tl.full((BLOCK,), 0.0, tl.float32)
    T = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(0, TILES, PART):
        tiles = first + tl.arange(0, PART)
        mask = (tiles[:, None] < TILES) & inside[None, :]
        at = parts + tiles[:, None].to(tl.int64) * stride_tile + offs[None, :]  # [PART, BLOCK]
        m = tl.load(at, mask=mask, other=LOWEST)
        s = tl.load(at + stride_kind, mask=mask, other=0.0)
        t = tl.load(at + 2 * stride_kind, mask=mask, other=0.0)
        top = tl.maximum(M, tl.max(m, 0))
        shift = tl.maximum((M - top) * f, FLOOR)
        T = tl.exp2(shift) * (T + shift * S)
        S = tl.exp2(shift) * S
        shifts = tl.maximum((m - top[None, :]) * f[None, :], FLOOR)
        scale = tl.exp2(shifts)
        S += tl.sum(scale * s, 0)
        T += tl.sum(scale * (t + shifts * s), 0)
        M = top
    if FINISH:
        rest = S - 1.0  # the maximum's own term is exactly 1, so log S near 0 is log1p of the rest
        ratio = rest / (2.0 + rest)
        square = ratio * ratio
        series = 0.2 + square * (0.14285714286 + square * (0.11111111111 + square * 0.09090909091))
        near = 2.0 * ratio * (1.0 + square * (0.33333333333 + square * series))
        log_s = tl.where(rest < 0.5, near * 1.4426950408889634, tl.log2(S))
        x = tl.load(label_ptr + offs, mask=inside, other=0.0)
        below = (x - M) * f
        log_p = tl.where(below - log_s > -0.99, -log_s, below - log_s)
        log_p = tl.where(log_p > 0.0, 0.0, log_p) * _LN2
        entropy = (log_s - T / S) * _LN2
        entropy = tl.where(entropy < 0.0, 0.0, tl.where(entropy > top_entropy, top_entropy, entropy))
        is_known = M > LOWEST  # else no logit can be told from −inf, nor from what lies beyond the vocabulary
        log_p = tl.where(is_known, log_p, float("nan"))
        entropy = tl.where(is_known, entropy, float("nan"))
        tl.store(stats + offs, M, mask=inside)
        tl.store(stats + stride_stats + offs, log_s, mask=inside)
        tl.store(stats + 2 * stride_stats + offs, entropy, mask=inside)
        tl.store(stats + 3 * stride_stats + offs, log_p, mask=inside)
        tl.store(log_prob_ptr + offs, log_p, mask=inside)
        tl.store(entropy_ptr + offs, entropy, mask=inside)
    else:
        tl.store(stats + offs, M, mask=inside)
        tl.store(stats + stride_stats + offs, S, mask=inside)
        tl.store(stats + 2 * stride_stats + offs, T, mask=inside)


def combine(parts, label, factor, stats, log_prob, entropy, vocab_size: int, *, finish: bool = True) -> None:
    """Fold parts [3, tiles, >= m] for m rows: into scores and the backward's statistics, or into M, S, T only.

    Args:
        parts: M, S and T of each tile; of any strides but that of rows, which is 1.
        label: [m] x of the labels.
        factor: f [m], or one number for all rows.
        stats: [4, m], rows M, log2 S, entropy, log_prob; not `finish`: [3, m], rows M, S, T.
        log_prob, entropy: [m] the same once more, for the caller to keep.
    """
    count = log_prob.shape[0] if isinstance(factor, float) else factor.shape[0]
    if count:
        _combine_kernel[(ceil_div(count, ROWS),)](
            parts,
            label,
            *factor_args(factor),
            stats,
            log_prob,
            entropy,
            count,
            parts.shape[1],
            parts.stride(0),
            parts.stride(1),
            stats.stride(0),
            math.log(vocab_size),
            BLOCK=ROWS,
            PART=TILES,
            FINISH=finish,
            num_warps=4,
        )
