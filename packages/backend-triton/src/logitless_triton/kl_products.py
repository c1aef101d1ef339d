"""The student's products: each tile of its logits meets the teacher's, which are held, and is then held no more.

Where both heads' normalisers are known a tile becomes its dz. Else it leaves five numbers a row: with x and f of
tile.py of the student, y and r of the teacher, a the one of the two that weighs and b the other,

    m = max x      n = max y      s = Σ 2^((x − m)·f)      σ = Σ 2^((y − n)·r)

    t = Σ 2^((x − m)·f)·((x − m)·f − (y − n)·r)            reverse: a is the student; forward: the other way round

from which `logitless_triton.kl_combine` makes the divergence. A tile is gone through by eighths: with two programs on a
multiprocessor its own logits take half of the registers, and its operands most of the shared memory.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from logitless_triton.config import Tile
from logitless_triton.forward import operands, scan
from logitless_triton.kept import Kept
from logitless_triton.kl_combine import combine_divergence
from logitless_triton.kl_kernels import FORWARD, dz_of, gap
from logitless_triton.layout import LOGITS
from logitless_triton.rows import Rows, Work
from logitless_triton.tile import (
    LOWEST,
    TYPES,
    ceil_div,
    descriptor,
    factor_args,
    factor_of,
    halves,
    place,
    raw_logits,
)

__all__ = ["divergences", "dz_from_teacher"]

_FORWARD = tl.constexpr(FORWARD)


@triton.jit
def _eighths(x, BM: tl.constexpr, BN: tl.constexpr):
    """A tile's parts, from left to right."""
    left, right = halves(x, BM, BN)
    first, second = halves(left, BM, BN // 2)
    third, fourth = halves(right, BM, BN // 2)
    a, b = halves(first, BM, BN // 4)
    c, d = halves(second, BM, BN // 4)
    e, f = halves(third, BM, BN // 4)
    g, h = halves(fourth, BM, BN // 4)
    return a, b, c, d, e, f, g, h


@triton.jit(do_not_specialize=["N", "stride_stats"])
def _student_kernel(
    h,
    w,
    ref,
    out,
    bias,
    lora_u,
    lora_b,
    f_ptr,
    f_value,
    ref_f_ptr,
    ref_f_value,
    stats,
    up_ptr,
    parts,
    N,
    V,
    D,
    R,
    pre,
    beta,
    stride_hn,
    stride_hd,
    stride_wv,
    stride_wd,
    stride_un,
    stride_ur,
    stride_bv,
    stride_br,
    stride_ref,
    stride_out,
    stride_stats,
    stride_kind,
    stride_tile,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    KIND: tl.constexpr,
    DZ: tl.constexpr,
    OUT_TYPE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEGATE: tl.constexpr,
):
    PIECE: tl.constexpr = BN // 8
    num_m = (N + BM - 1) // BM
    num_n = (V + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=FLATTEN):
        pm, pn = place(tile, num_m, num_n, GROUP)
        rows = pm * BM + tl.arange(0, BM)
        inside = rows < N
        at = pn.to(tl.int64) * stride_tile + rows
        if not DZ:  # asked for here, it is there when the products are
            n = tl.load(parts + stride_kind + at, mask=inside, other=0.0)[:, None]
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
        f = factor_of(f_ptr, f_value, rows, inside, BM)[:, None]
        ref_f = factor_of(ref_f_ptr, ref_f_value, rows, inside, BM)[:, None]
        if DZ:
            m = tl.load(stats + rows, mask=inside, other=0.0)[:, None]
            n = tl.load(stats + stride_stats + rows, mask=inside, other=0.0)[:, None]
            log_s = tl.load(stats + 2 * stride_stats + rows, mask=inside, other=0.0)[:, None]
            ref_log_s = tl.load(stats + 3 * stride_stats + rows, mask=inside, other=0.0)[:, None]
            relative = tl.load(stats + 4 * stride_stats + rows, mask=inside, other=0.0)[:, None]
            up = tl.load(up_ptr + rows, mask=inside, other=0.0)[:, None]
        else:
            x = tl.where((pn * BN + tl.arange(0, BN))[None, :] < V, x, LOWEST)
            m = tl.maximum(tl.max(x, 1), LOWEST)[:, None]  # finite: −inf − −inf would be NaN
            sums = tl.full((BM, 2), 0.0, tl.float32)
            t = tl.full((BM,), 0.0, tl.float32)
        pieces = _eighths(x, BM, BN)
        for i in tl.static_range(8):
            z = pieces[i]
            cols = pn * BN + i * PIECE + tl.arange(0, PIECE)[None, :]
            if TMA:
                y = ref.load([pm * BM, pn * BN + i * PIECE])
            else:
                mask = inside[:, None] & (cols < V)
                y = tl.load(ref + rows.to(tl.int64)[:, None] * stride_ref + cols, mask=mask, other=LOWEST)
            if DZ:
                value = dz_of((z - m) * f - log_s, (y - n) * ref_f - ref_log_s, relative, beta, KIND) * up
                if SOFTCAP:
                    value *= 1.0 - z * z
            else:
                d = (z - m) * f
                ref_d = (y - n) * ref_f
                p = tl.exp2(d)
                q = tl.exp2(ref_d)  # 0 beyond V: `scan` holds whole tiles, with LOWEST there
                weight = q if KIND == _FORWARD else p
                sums += tl.sum(tl.join(p, q), 1)  # both in one order
                # 0·log(0/b) is 0, where 0·(−inf) would be NaN
                t += tl.sum(tl.where(weight == 0.0, 0.0, weight * gap(d, ref_d, KIND == _FORWARD)), 1)
                value = z
            if out is not None:
                if TMA:
                    out.store([pm * BM, pn * BN + i * PIECE], value.to(OUT_TYPE))
                else:
                    to = out + rows.to(tl.int64)[:, None] * stride_out + cols
                    tl.store(to, value.to(OUT_TYPE), mask=inside[:, None] & (cols < V))
        if not DZ:
            tl.store(parts + at, tl.reshape(m, (BM,)), mask=inside)
            s, ref_s = tl.split(sums)
            tl.store(parts + 2 * stride_kind + at, s, mask=inside)
            tl.store(parts + 3 * stride_kind + at, ref_s, mask=inside)
            tl.store(parts + 4 * stride_kind + at, t, mask=inside)


def _launch(
    work: Work,
    rows: Rows,
    ref_rows: Rows,
    ref: Tensor,
    out: Tensor | None,
    kind: int,
    *,
    beta: float = 0.0,
    stats: Tensor | None = None,
    up: Tensor | None = None,
    parts: Tensor | None = None,
) -> None:
    """`_student_kernel` on the columns of work's head; makes dz where `stats` are given, else fills `parts`."""
    head, tile = work.head, work.config.forward if stats is None else work.config.dz
    tiles = ceil_div(rows.count, tile.rows) * ceil_div(head.valid, tile.columns)
    if not tiles:
        return
    given, tma = _operands(work, tile, rows, ref, out)
    _student_kernel[(min(work.programs(tile), tiles),)](
        *given,
        head.bias,
        rows.lora_u,
        head.lora_b,
        *factor_args(rows.factor),
        *factor_args(ref_rows.factor),
        stats,
        up,
        parts,
        rows.count,
        head.valid,
        head.hidden_size,
        head.rank,
        head.pre,
        beta,
        *rows.hidden.stride(),
        *head.weight.stride(),
        *rows.lora_strides,
        *head.lora_strides,
        ref.stride(0),
        0 if out is None else out.stride(0),
        0 if stats is None else stats.stride(0),
        *((0, 0) if parts is None else parts.stride()[:2]),
        TMA=tma,
        FLATTEN=tma and not head.rank,
        KIND=kind,
        DZ=stats is not None,
        OUT_TYPE=tl.float32 if out is None else TYPES[out.dtype],
        **work.multiplying(tile),
    )


def _operands(work: Work, tile: Tile, rows: Rows, ref: Tensor, out: Tensor | None):
    """hidden, weight, the teacher's logits and what is written, as TMA descriptors or as tensors."""
    h, w, tma = operands(work, rows, tile)
    if tma:
        piece = [tile.rows, tile.columns // 8]
        y, target = descriptor(ref, piece), None if out is None else descriptor(out, piece)
        if y is not None and (target is None) == (out is None):
            return (h, w, y, target), True
    return (rows.hidden, work.head.weight, ref, out), False


def dz_from_teacher(
    work: Work,
    rows: tuple[Rows, Rows],
    ref: Tensor,
    stats: Tensor,
    up: Tensor,
    out: Tensor,
    kind: int,
    beta: float,
) -> None:
    """dz [m, C] of the columns of work's head, from the teacher's logits of them; rows are of both heads."""
    _launch(work, *rows, ref, out, kind, beta=beta, stats=stats, up=up)


def divergences(
    work: Work, ref: Work, rows: tuple[Rows, Rows], held: tuple[Tensor | None, Tensor], kind: int, stats: Tensor
) -> None:
    """Divergences of a block of rows into stats [5, m]: M and log2 S of both, the divergence in nats.

    Args:
        rows: of the student and of the teacher.
        held: where their logits are put, [m, whole tiles]; the student's need not be.
        kind: FORWARD or REVERSE.
    """
    (mine, those), width = rows, work.config.forward.columns
    tiles, padded = ceil_div(work.head.valid, width), ceil_div(mine.count, 16) * 16
    parts = work.empty(5, tiles, padded)
    # The teacher's maxima stand where they are wanted; its sums are made once more, of the student's tile's parts in
    # the same order as the student's, so that equal heads have equal sums.
    scan(ref, those, Kept(LOGITS, ref.head.valid, width, held[1]), None, parts[1:4])
    _launch(work, mine, those, held[1], held[0], kind, parts=parts)
    combine_divergence(parts, rows, work.problem.group, kind, stats)
