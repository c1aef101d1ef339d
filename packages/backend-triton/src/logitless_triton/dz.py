"""dz of a block of vocab columns, the gradient of raw logits: from the logits made again, or from what was kept.

    q = (x − M)·f − log2 S = log2 p                p = 2^q
    dz = (A + B·q)·p      A = −(g + e·H)·k      B = −e·ln2·k      k = slope·f = s/T      (·(1 − x²) with a softcap)
    dz at the label = −g·k·expm1(log p) − e·k·p·(log p + H)

The label's element is taken from log_prob: 1 − p would lose its digits where p is near 1.

Over a kept set p is 0 below the line. With several labels, or a kept set: `logitless_triton.several`.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from logitless_triton.kept import Kept
from logitless_triton.tile import (
    FLOOR,
    LN2,
    TYPES,
    ceil_div,
    descriptor,
    expm1,
    factor_args,
    factor_of,
    halves,
    place,
    raw_logits,
)

__all__ = ["coefficients", "dz_from_kept", "dz_from_logits"]

_LN2 = tl.constexpr(LN2)


@triton.jit
def _coefficients(
    g_ptr, e_ptr, dz_scale_ptr, f, stats, rows, inside, stride_g, stride_e, stride_stats, slope, SIZE: tl.constexpr
):
    """A, B and dz at the label, of rows [SIZE]."""
    k = f * slope
    if dz_scale_ptr is not None:
        k *= tl.load(dz_scale_ptr)
    g = tl.load(g_ptr + rows * stride_g, mask=inside, other=0.0) * k
    entropy = tl.load(stats + 2 * stride_stats + rows, mask=inside, other=0.0)
    log_p = tl.load(stats + 3 * stride_stats + rows, mask=inside, other=0.0)
    label = -g * expm1(log_p)
    a = -g
    b = tl.full((SIZE,), 0.0, tl.float32)
    if e_ptr is not None:
        e = tl.load(e_ptr + rows * stride_e, mask=inside, other=0.0) * k
        a -= e * entropy
        b -= e * _LN2
        finite = tl.maximum(log_p, -1.0e4, propagate_nan=tl.PropagateNan.ALL)
        label -= e * tl.exp2(finite * 1.4426950408889634) * (finite + entropy)
    return a, b, label


@triton.jit(do_not_specialize=["N", "stride_stats"])
def _coefficients_kernel(
    g_ptr,
    e_ptr,
    dz_scale_ptr,
    f_ptr,
    f_value,
    stats,
    out,
    N,
    stride_g,
    stride_e,
    stride_stats,
    slope,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < N
    f = factor_of(f_ptr, f_value, rows, inside, BLOCK)
    a, b, label = _coefficients(
        g_ptr, e_ptr, dz_scale_ptr, f, stats, rows, inside, stride_g, stride_e, stride_stats, slope, BLOCK
    )
    tl.store(out + rows, a, mask=inside)
    tl.store(out + N + rows, b, mask=inside)
    tl.store(out + 2 * N + rows, label, mask=inside)


def coefficients(work: Any, rows: Any, stats: Tensor, g: Tensor, e: Tensor | None, dz_scale: Tensor | None) -> Tensor:
    """[3, m]: A, B and dz at the label."""
    out = work.empty(3, rows.count)
    if rows.count:
        _coefficients_kernel[(ceil_div(rows.count, 256),)](
            g,
            e,
            dz_scale,
            *factor_args(rows.factor),
            stats,
            out,
            rows.count,
            g.stride(0),
            0 if e is None else e.stride(0),
            stats.stride(0),
            work.head.slope,
            BLOCK=256,
            num_warps=4,
        )
    return out


@triton.jit
def _row_facts(stats, label_ptr, rows, inside, stride_stats, col0):
    """M, log2 S and the first label of rows, as a column of this block."""
    M = tl.load(stats + rows, mask=inside, other=0.0)
    log_s = tl.load(stats + stride_stats + rows, mask=inside, other=0.0)
    label = tl.load(label_ptr + rows, mask=inside, other=-1) - col0
    return M, log_s, label


@triton.jit(do_not_specialize=["N", "stride_stats", "stride_coefs"])
def _recompute_kernel(
    h,
    w,
    out,
    bias,
    lora_u,
    lora_b,
    f_ptr,
    f_value,
    label_ptr,
    stats,
    coefs,
    N,
    V,
    D,
    R,
    col0,
    labels,
    pre,
    stride_hn,
    stride_hd,
    stride_wv,
    stride_wd,
    stride_un,
    stride_ur,
    stride_bv,
    stride_br,
    stride_stats,
    stride_coefs,
    stride_out,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    OUT_TYPE: tl.constexpr,
    ENTROPY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEGATE: tl.constexpr,
    INFINITE: tl.constexpr,
    TRUNCATED: tl.constexpr,
    SEVERAL: tl.constexpr,
):
    num_m = (N + BM - 1) // BM
    num_n = (V + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=FLATTEN):
        pm, pn = place(tile, num_m, num_n, GROUP)
        x = raw_logits(
            h,
            w,
            bias,
            lora_u,
            lora_b,
            pm * BM,
            pn * BN,
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
            BM,
            BN,
            BK,
            BR,
            TMA,
            SOFTCAP,
            NEGATE,
        )
        rows = pm * BM + tl.arange(0, BM)
        cols = pn * BN + tl.arange(0, BN)
        inside = rows < N
        f = factor_of(f_ptr, f_value, rows, inside, BM)
        M, log_s, label = _row_facts(stats, label_ptr, rows, inside, stride_stats, col0)
        a = tl.load(coefs + rows, mask=inside, other=0.0)
        b = tl.load(coefs + stride_coefs + rows, mask=inside, other=0.0)
        at_label = tl.load(coefs + 2 * stride_coefs + rows, mask=inside, other=0.0)
        q = (x - M[:, None]) * f[:, None] - log_s[:, None]
        if INFINITE:
            q = tl.maximum(q, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        p = tl.exp2(q)
        if TRUNCATED:
            line = tl.load(stats + 3 * stride_stats + rows, mask=inside, other=0.0)
            p = tl.where(x < line[:, None], 0.0, p)
        dz = p * (a[:, None] + b[:, None] * q) if ENTROPY else p * a[:, None]
        if SEVERAL:
            for i in range(labels):
                own = tl.load(label_ptr + i * N + rows, mask=inside, other=-1) - col0
                value = tl.load(coefs + (2 + i) * stride_coefs + rows, mask=inside, other=0.0)
                dz = tl.where(cols[None, :] == own.to(tl.int32)[:, None], value[:, None], dz)
        else:
            dz = tl.where(cols[None, :] == label.to(tl.int32)[:, None], at_label[:, None], dz)
        if SOFTCAP:
            dz *= 1.0 - x * x
        if TMA:
            left, right = halves(dz, BM, BN)
            out.store([pm * BM, pn * BN], left.to(OUT_TYPE))
            out.store([pm * BM, pn * BN + BN // 2], right.to(OUT_TYPE))
        else:
            at = rows.to(tl.int64)[:, None] * stride_out + cols[None, :]
            tl.store(out + at, dz.to(OUT_TYPE), mask=inside[:, None] & (cols < V)[None, :])


def dz_from_logits(work: Any, rows: Any, stats: Tensor, coefs: Tensor, entropy: bool, start: int, out: Tensor) -> None:
    """dz [m, C] of the columns from `start` on, into out, the logits made again.

    Args:
        rows: the block's `Rows`; its labels are rows of this rank's whole weight.
        stats: [4, m] or [4 + K, m], the forward's.
        coefs: [3, m] of `coefficients`, or [2 + K, m] of `several.label_coefficients`.
        entropy: whether the entropy has an upstream gradient.
    """
    tile = work.config.dz
    head = work.head.columns(start, start + out.shape[1])
    tiles = ceil_div(rows.count, tile.rows) * ceil_div(head.valid, tile.columns)
    if not tiles:
        return
    tma, several = False, rows.labels.ndim == 2
    h, w, target = rows.hidden, head.weight, out
    if work.device.has_tma:
        described = (
            descriptor(h, [tile.rows, tile.depth]),
            descriptor(w, [tile.columns, tile.depth]),
            descriptor(out, [tile.rows, tile.columns // 2]),
        )
        if None not in described:
            (h, w, target), tma = described, True
    _recompute_kernel[(min(work.programs(tile), tiles),)](
        h,
        w,
        target,
        head.bias,
        rows.lora_u,
        head.lora_b,
        *factor_args(rows.factor),
        rows.labels.T.contiguous() if several else rows.labels,
        stats,
        coefs,
        rows.count,
        head.valid,
        head.hidden_size,
        head.rank,
        start,
        rows.labels.shape[1] if several else 1,
        head.pre,
        *rows.hidden.stride(),
        *head.weight.stride(),
        *rows.lora_strides,
        *head.lora_strides,
        stats.stride(0),
        coefs.stride(0),
        out.stride(0),
        TMA=tma,
        FLATTEN=tma and not head.rank and not several,
        OUT_TYPE=TYPES[out.dtype],
        ENTROPY=entropy,
        INFINITE=head.bias is not None,
        TRUNCATED=work.truncated,
        SEVERAL=several,
        **work.multiplying(tile),
    )


@triton.jit(do_not_specialize=["N", "stride_stats"])
def _convert_kernel(
    kept,
    maxima,
    out,
    g_ptr,
    e_ptr,
    dz_scale_ptr,
    f_ptr,
    f_value,
    label_ptr,
    stats,
    N,
    V,
    col0,
    slope,
    stride_kept,
    stride_maxima,
    stride_g,
    stride_e,
    stride_stats,
    stride_out,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TILES: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    blocks = (V + BN * TILES - 1) // (BN * TILES)
    rows = (tl.program_id(0) // blocks) * BM + tl.arange(0, BM)
    first = (tl.program_id(0) % blocks) * TILES
    inside = rows < N
    f = factor_of(f_ptr, f_value, rows, inside, BM)
    M, log_s, label = _row_facts(stats, label_ptr, rows, inside, stride_stats, col0)
    a, b, at_label = _coefficients(
        g_ptr, e_ptr, dz_scale_ptr, f, stats, rows, inside, stride_g, stride_e, stride_stats, slope, BM
    )
    for i in range(TILES):
        tile = first + i
        cols = tile * BN + tl.arange(0, BN)
        mask = inside[:, None] & (cols < V)[None, :]
        at = (col0 // BN + tile).to(tl.int64) * stride_maxima + rows
        m = tl.load(maxima + at, mask=rows < tl.where(tile * BN < V, N, 0), other=0.0)
        at = rows.to(tl.int64)[:, None] * stride_kept + (col0 + cols)[None, :]
        d = tl.load(kept + at, mask=mask, other=0.0).to(tl.float32)
        q = d + ((m - M) * f - log_s)[:, None]
        q = tl.maximum(q, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        p = tl.exp2(q)
        dz = p * (a[:, None] + b[:, None] * q) if e_ptr is not None else p * a[:, None]
        dz = tl.where(cols[None, :] == label.to(tl.int32)[:, None], at_label[:, None], dz)
        if SOFTCAP:
            x = m[:, None] + d / f[:, None]
            dz *= tl.maximum(1.0 - x * x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        at = rows.to(tl.int64)[:, None] * stride_out + cols[None, :]
        tl.store(out + at, dz.to(out.dtype.element_ty), mask=mask)


def dz_from_kept(
    work: Any, rows: Any, kept: Kept, stats: Tensor, grads: Any, dz_scale: Tensor | None, start: int, out: Tensor
) -> None:
    """dz [m, C] of the columns from `start` on, a multiple of a tile's width, from the kept differences.

    `out` may be the kept columns' own memory, in a type of the same size: each element is read before it is written.
    """
    width, columns, (g, e) = kept.width, out.shape[1], grads
    block_rows, tiles = max(1, 1024 // width), 16
    if not rows.count or not columns:
        return
    grid = (ceil_div(rows.count, block_rows) * ceil_div(columns, width * tiles),)
    _convert_kernel[grid](
        kept.body,
        kept.maxima,
        out,
        g,
        e,
        dz_scale,
        *factor_args(rows.factor),
        rows.labels,
        stats,
        rows.count,
        columns,
        start,
        work.head.slope,
        kept.body.stride(0),
        kept.maxima.stride(0),
        g.stride(0),
        0 if e is None else e.stride(0),
        stats.stride(0),
        out.stride(0),
        BM=block_rows,
        BN=width,
        TILES=tiles,
        SOFTCAP=work.head.softcap,
        num_warps=4,
    )
