"""Kernels of the divergence of two heads: both heads' tile in one program, reduced or turned into dz on the chip.

Of a tile, with d = (x − m)·f of the student and of the teacher (x, f: see tile.py) and e = 2^d,

    STATISTICS    m, s = Σ e of both, and gap = Σ e_a·(d_a − d_b) of a, which weighs the divergence, over b
    MIXTURE       Σ p·log2(p/μ), Σ q·log2(q/μ), μ = β·q + (1 − β)·p: Jensen-Shannon's second sweep
    DZ            k·g·(p − q), k·g·p·(ln(p/q) − KL) or k·g·(1 − β)·p·(ln(p/μ) − KL(p‖μ)), k = slope·f

A head against itself gives exactly 0: `STATISTICS` and the fold are compiled without fused multiply-adds, which would
round d_a and not d_b.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

import triton
import triton.language as tl

from logitless_triton.tile import LN2, halves, pair_logits, place

__all__ = ["DZ", "FORWARD", "JSD", "MIXTURE", "REVERSE", "STATISTICS", "fold_kernel", "kl_kernel"]

STATISTICS, MIXTURE, DZ = 0, 1, 2
_STATISTICS, _MIXTURE = tl.constexpr(STATISTICS), tl.constexpr(MIXTURE)
FORWARD, REVERSE, JSD = 0, 1, 2
_FORWARD, _REVERSE = tl.constexpr(FORWARD), tl.constexpr(REVERSE)
LOWEST = tl.constexpr(-1.0e30)  # where maxima start: finite, and so are the differences of two
_LN2 = tl.constexpr(LN2)


@triton.jit
def _surprise(weight, ratio, share):
    """weight·log2(weight/μ) where ratio is the other's log2 less its own, and share the other's part of μ."""
    # 100: no weight that a sum sees lies that far below the other, and 2^ratio stays finite.
    other = tl.exp2(tl.minimum(ratio, 100.0, propagate_nan=tl.PropagateNan.ALL))
    return tl.where(weight == 0.0, 0.0, -weight * tl.log2(1.0 - share + share * other))


@triton.jit(do_not_specialize=["N", "stride_stats"])
def kl_kernel(
    h,
    w,
    bias,
    lora_u,
    lora_b,
    f_ptr,
    ref_h,
    ref_w,
    ref_bias,
    ref_lora_u,
    ref_lora_b,
    ref_f_ptr,
    stats,
    up_ptr,
    out,
    N,
    V,
    D,
    R,
    ref_D,
    ref_R,
    pre,
    ref_pre,
    beta,
    stride_hn,
    stride_hd,
    stride_wv,
    stride_wd,
    stride_un,
    stride_ur,
    stride_bv,
    stride_br,
    ref_stride_hn,
    ref_stride_hd,
    ref_stride_wv,
    ref_stride_wd,
    ref_stride_un,
    ref_stride_ur,
    ref_stride_bv,
    ref_stride_br,
    stride_stats,
    stride_out,
    stride_tile,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    REF_BR: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
    TMA: tl.constexpr,
    REF_TMA: tl.constexpr,
    WIDER: tl.constexpr,
    OUT_TMA: tl.constexpr,
    OUT_TYPE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEGATE: tl.constexpr,
    REF_SOFTCAP: tl.constexpr,
    REF_NEGATE: tl.constexpr,
    MODE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Parts [5, tiles, >= N] (two of them for `MIXTURE`), or dz [N, V], of both heads' tiles."""
    num_m = (N + BM - 1) // BM
    num_n = (V + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=FLATTEN):
        pm, pn = place(tile, num_m, num_n, GROUP)
        x, y = pair_logits(
            h,
            w,
            bias,
            lora_u,
            lora_b,
            ref_h,
            ref_w,
            ref_bias,
            ref_lora_u,
            ref_lora_b,
            pm * BM,
            pn * BN,
            N,
            V,
            D,
            R,
            ref_D,
            ref_R,
            pre,
            ref_pre,
            stride_hn,
            stride_hd,
            stride_wv,
            stride_wd,
            stride_un,
            stride_ur,
            stride_bv,
            stride_br,
            ref_stride_hn,
            ref_stride_hd,
            ref_stride_wv,
            ref_stride_wd,
            ref_stride_un,
            ref_stride_ur,
            ref_stride_bv,
            ref_stride_br,
            BM,
            BN,
            BK,
            BR,
            REF_BR,
            TMA,
            REF_TMA,
            WIDER,
            SOFTCAP,
            NEGATE,
            REF_SOFTCAP,
            REF_NEGATE,
        )
        rows = pm * BM + tl.arange(0, BM)
        cols = pn * BN + tl.arange(0, BN)
        inside = rows < N
        f = tl.load(f_ptr + rows, mask=inside, other=0.0)
        ref_f = tl.load(ref_f_ptr + rows, mask=inside, other=0.0)
        if MODE == _STATISTICS:
            x = tl.where(cols[None, :] < V, x, float("-inf"))
            y = tl.where(cols[None, :] < V, y, float("-inf"))
            m = tl.maximum(tl.max(x, 1), LOWEST)
            ref_m = tl.maximum(tl.max(y, 1), LOWEST)
            d = (x - m[:, None]) * f[:, None]
            ref_d = (y - ref_m[:, None]) * ref_f[:, None]
            e = tl.exp2(d)
            ref_e = tl.exp2(ref_d)
            at = out + pn.to(tl.int64) * stride_tile + rows
            tl.store(at, m, mask=inside)
            tl.store(at + stride_out, ref_m, mask=inside)
            tl.store(at + 2 * stride_out, tl.sum(e, 1), mask=inside)
            tl.store(at + 3 * stride_out, tl.sum(ref_e, 1), mask=inside)
            if KIND == _FORWARD:  # 0·log(0/b) is 0, where 0·(−inf) would be NaN
                gap = tl.sum(tl.where(ref_e == 0.0, 0.0, ref_e * (ref_d - d)), 1)
                tl.store(at + 4 * stride_out, gap, mask=inside)
            elif KIND == _REVERSE:
                gap = tl.sum(tl.where(e == 0.0, 0.0, e * (d - ref_d)), 1)
                tl.store(at + 4 * stride_out, gap, mask=inside)
            else:
                tl.store(at + 4 * stride_out, tl.zeros((BM,), tl.float32), mask=inside)
        else:
            M = tl.load(stats + rows, mask=inside, other=0.0)
            ref_M = tl.load(stats + stride_stats + rows, mask=inside, other=0.0)
            log_s = tl.load(stats + 2 * stride_stats + rows, mask=inside, other=0.0)
            ref_log_s = tl.load(stats + 3 * stride_stats + rows, mask=inside, other=0.0)
            log_p = (x - M[:, None]) * f[:, None] - log_s[:, None]
            log_q = (y - ref_M[:, None]) * ref_f[:, None] - ref_log_s[:, None]
            p = tl.exp2(log_p)
            q = tl.exp2(log_q)
            if MODE == _MIXTURE:
                real = cols[None, :] < V
                at = out + pn.to(tl.int64) * stride_tile + rows
                mine = tl.sum(tl.where(real, _surprise(p, log_q - log_p, beta), 0.0), 1)
                tl.store(at + 2 * stride_out, mine, mask=inside)
                other = tl.sum(tl.where(real, _surprise(q, log_p - log_q, 1.0 - beta), 0.0), 1)
                tl.store(at + 3 * stride_out, other, mask=inside)
            else:
                up = tl.load(up_ptr + rows, mask=inside, other=0.0)
                if KIND == _FORWARD:
                    dz = p - q
                else:
                    relative = tl.load(stats + 4 * stride_stats + rows, mask=inside, other=0.0)
                    slope = p * (log_p - log_q) if KIND == _REVERSE else _surprise(p, log_q - log_p, beta)
                    dz = tl.where(p == 0.0, 0.0, slope * _LN2 - p * relative[:, None])  # log_p or log_q may be −inf
                dz *= up[:, None]
                if SOFTCAP:
                    dz *= 1.0 - x * x
                if OUT_TMA:
                    left, right = halves(dz, BM, BN)
                    out.store([pm * BM, pn * BN], left.to(OUT_TYPE))
                    out.store([pm * BM, pn * BN + BN // 2], right.to(OUT_TYPE))
                else:
                    at = out + rows.to(tl.int64)[:, None] * stride_out + cols[None, :]
                    tl.store(at, dz.to(OUT_TYPE), mask=inside[:, None] & (cols < V)[None, :])


@triton.jit(do_not_specialize=["N", "TILES", "stride_out"])
def fold_kernel(
    parts,
    f_ptr,
    ref_f_ptr,
    out,
    N,
    TILES,
    stride_kind,
    stride_tile,
    stride_out,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    KIND: tl.constexpr,
):
    """Parts of tiles, or of ranks, to one: [5, N], in a fixed order."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < N
    f = tl.load(f_ptr + offs, mask=inside, other=0.0)
    ref_f = tl.load(ref_f_ptr + offs, mask=inside, other=0.0)
    M = tl.full((BLOCK,), LOWEST, tl.float32)
    ref_M = tl.full((BLOCK,), LOWEST, tl.float32)
    S = tl.full((BLOCK,), 0.0, tl.float32)
    ref_S = tl.full((BLOCK,), 0.0, tl.float32)
    gap = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(0, TILES, PART):
        tiles = first + tl.arange(0, PART)
        mask = (tiles[:, None] < TILES) & inside[None, :]
        at = parts + tiles[:, None].to(tl.int64) * stride_tile + offs[None, :]  # [PART, BLOCK]
        m = tl.load(at, mask=mask, other=LOWEST)
        ref_m = tl.load(at + stride_kind, mask=mask, other=LOWEST)
        s = tl.load(at + 2 * stride_kind, mask=mask, other=0.0)
        ref_s = tl.load(at + 3 * stride_kind, mask=mask, other=0.0)
        g = tl.load(at + 4 * stride_kind, mask=mask, other=0.0)
        top = tl.maximum(M, tl.max(m, 0))
        ref_top = tl.maximum(ref_M, tl.max(ref_m, 0))
        gap = _moved(gap, S, ref_S, (M - top) * f, (ref_M - ref_top) * ref_f, KIND)
        S *= tl.exp2((M - top) * f)
        ref_S *= tl.exp2((ref_M - ref_top) * ref_f)
        shift = (m - top[None, :]) * f[None, :]
        ref_shift = (ref_m - ref_top[None, :]) * ref_f[None, :]
        gap += tl.sum(_moved(g, s, ref_s, shift, ref_shift, KIND), 0)
        S += tl.sum(tl.exp2(shift) * s, 0)
        ref_S += tl.sum(tl.exp2(ref_shift) * ref_s, 0)
        M = top
        ref_M = ref_top
    tl.store(out + offs, M, mask=inside)
    tl.store(out + stride_out + offs, ref_M, mask=inside)
    tl.store(out + 2 * stride_out + offs, S, mask=inside)
    tl.store(out + 3 * stride_out + offs, ref_S, mask=inside)
    tl.store(out + 4 * stride_out + offs, gap, mask=inside)


@triton.jit
def _moved(gap, s, ref_s, shift, ref_shift, KIND: tl.constexpr):
    """A block's gap relative to larger maxima; what is infinite where nothing weighs it counts nothing."""
    if KIND == _FORWARD:
        moved = (gap + ref_s * (ref_shift - shift)) * tl.exp2(ref_shift)
        return tl.where(tl.exp2(ref_shift) * ref_s == 0.0, 0.0, moved)
    moved = (gap + s * (shift - ref_shift)) * tl.exp2(shift)
    return tl.where(tl.exp2(shift) * s == 0.0, 0.0, moved)
