"""Tiles' (or ranks') numbers of two heads to a token's divergence, in a fixed order.

With m, n, s, σ and t of a tile as in kl_products.py, f and r of the student and of the teacher, a the head that weighs,

    M = max m      S = Σ 2^((m − M)·f)·s      likewise N and Σ of n and σ
    T = Σ 2^((m − M)·f)·(t + ((m − M)·f − (n − N)·r)·s)              reverse; forward: the other way round

    KL(a‖b) = (T/S_a + log2(S_b/S_a))·ln 2

Every difference is relative to its own head's maximum, so offsets that a head's logits share cancel before anything is
multiplied. Of equal heads t is 0, s is σ, and so is all that follows: exactly 0.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.collectives import gather_stacked
from logitless_triton.combine import ROWS, TILES
from logitless_triton.kl_kernels import FORWARD, gap
from logitless_triton.rows import Rows
from logitless_triton.tile import FLOOR, LN2, LOWEST, ceil_div, factor_args, factor_of

__all__ = ["combine_divergence"]

_FORWARD = tl.constexpr(FORWARD)


@triton.jit(do_not_specialize=["N", "TILES", "stride_out"])
def _combine_kernel(
    parts,
    f_ptr,
    f_value,
    ref_f_ptr,
    ref_f_value,
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
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < N
    f = factor_of(f_ptr, f_value, rows, inside, BLOCK)[None, :]
    ref_f = factor_of(ref_f_ptr, ref_f_value, rows, inside, BLOCK)[None, :]
    M = tl.full((BLOCK,), LOWEST, tl.float32)
    ref_M = tl.full((BLOCK,), LOWEST, tl.float32)
    for first in range(0, TILES, PART):
        tiles = first + tl.arange(0, PART)[:, None]
        mask = (tiles < TILES) & inside[None, :]
        at = parts + tiles.to(tl.int64) * stride_tile + rows[None, :]  # [PART, BLOCK]
        M = tl.maximum(M, tl.max(tl.load(at, mask=mask, other=LOWEST), 0))
        ref_M = tl.maximum(ref_M, tl.max(tl.load(at + stride_kind, mask=mask, other=LOWEST), 0))
    S = tl.full((BLOCK,), 0.0, tl.float32)
    S_ref = tl.full((BLOCK,), 0.0, tl.float32)
    T = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(0, TILES, PART):
        tiles = first + tl.arange(0, PART)[:, None]
        mask = (tiles < TILES) & inside[None, :]
        at = parts + tiles.to(tl.int64) * stride_tile + rows[None, :]
        d = (tl.load(at, mask=mask, other=LOWEST) - M[None, :]) * f
        ref_d = (tl.load(at + stride_kind, mask=mask, other=LOWEST) - ref_M[None, :]) * ref_f
        scale = tl.exp2(tl.maximum(d, FLOOR))
        ref_scale = tl.exp2(tl.maximum(ref_d, FLOOR))
        s = tl.load(at + 2 * stride_kind, mask=mask, other=0.0)
        ref_s = tl.load(at + 3 * stride_kind, mask=mask, other=0.0)
        t = tl.load(at + 4 * stride_kind, mask=mask, other=0.0)
        S += tl.sum(scale * s, 0)
        S_ref += tl.sum(ref_scale * ref_s, 0)
        if KIND == _FORWARD:
            s, scale = ref_s, ref_scale
        T += tl.sum(tl.where(scale == 0.0, 0.0, scale * (t + gap(d, ref_d, KIND == _FORWARD) * s)), 0)
    tl.store(out + rows, M, mask=inside)
    tl.store(out + stride_out + rows, ref_M, mask=inside)
    tl.store(out + 2 * stride_out + rows, S, mask=inside)
    tl.store(out + 3 * stride_out + rows, S_ref, mask=inside)
    tl.store(out + 4 * stride_out + rows, T, mask=inside)


def _combine(parts: Tensor, rows: Rows, ref_rows: Rows, out: Tensor, kind: int) -> None:
    """parts [5, tiles, >= m], of any strides but that of rows, into out [5, >= m]."""
    _combine_kernel[(ceil_div(rows.count, ROWS),)](
        parts,
        *factor_args(rows.factor),
        *factor_args(ref_rows.factor),
        out,
        rows.count,
        parts.shape[1],
        parts.stride(0),
        parts.stride(1),
        out.stride(0),
        BLOCK=ROWS,
        PART=TILES,
        KIND=kind,
        num_warps=4,
    )


def combine_divergence(parts: Tensor, rows: tuple[Rows, Rows], group, kind: int, stats: Tensor) -> None:
    """parts [5, tiles, >= m] of m rows, of all ranks' tiles, into stats [5, m]: M and log2 S of both, KL in nats."""
    mine, those = rows
    found = parts.new_empty(5, parts.shape[2])
    _combine(parts, mine, those, found, kind)
    if group is not None:
        ranks = gather_stacked(found, group).transpose(0, 1)  # [5, size, >= m]
        found = torch.empty_like(found)
        _combine(ranks, mine, those, found, kind)
    found = found[:, : mine.count]
    a, b = (found[3], found[2]) if kind == FORWARD else (found[2], found[3])
    stats[:2] = found[:2]
    torch.log2(found[2:4], out=stats[2:4])
    stats[4] = (found[4] / a + (b / a).log2()).mul_(LN2).clamp_(min=0.0)
