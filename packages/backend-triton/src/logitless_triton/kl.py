"""Divergence of two heads: both heads' tile in one program, reduced or turned into dz on the chip.

Of a tile, with d = (x − m)·f of the student and of the teacher (x, f: see tile.py) and e = 2^d,

    STATISTICS    m, s = Σ e of both, and gap = Σ e_a·(d_a − d_b) of a, which weighs the divergence, over b
    MIXTURE       Σ p·log2(p/μ), Σ q·log2(q/μ), μ = β·q + (1 − β)·p: Jensen-Shannon's second sweep
    DZ            k·g·(p − q), k·g·p·(ln(p/q) − KL) or k·g·(1 − β)·p·(ln(p/μ) − KL(p‖μ)), k = slope·f

The products of dz are cuBLAS's, block by block of columns, as in `logitless_triton.backward`. Equals
`logitless.reference.linear_kl`.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.collectives import gather_stacked
from logitless.types import Gradients, Needs, Problem
from logitless_triton.config import INTERPRETED, Tile
from logitless_triton.layout import CHUNK, Blocks
from logitless_triton.rows import Head, Rows, Work
from logitless_triton.sums import Sums, pass_scale
from logitless_triton.tile import LN2, ceil_div, descriptor, halves, place, raw_logits

__all__ = ["kl_backward", "kl_forward"]

STATISTICS, MIXTURE, DZ = 0, 1, 2
_STATISTICS, _MIXTURE = tl.constexpr(STATISTICS), tl.constexpr(MIXTURE)
FORWARD, REVERSE, JSD = 0, 1, 2
_FORWARD, _REVERSE = tl.constexpr(FORWARD), tl.constexpr(REVERSE)
KINDS = {"forward": FORWARD, "reverse": REVERSE, "jsd": JSD}
LOWEST = tl.constexpr(-1.0e30)  # where maxima start: finite, and so are the differences of two
_LN2 = tl.constexpr(LN2)
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def _surprise(weight, ratio, share):
    """weight·log2(weight/μ) where ratio is the other's log2 less its own, and share the other's part of μ."""
    # 100: no weight that a sum sees lies that far below the other, and 2^ratio stays finite.
    other = tl.exp2(tl.minimum(ratio, 100.0, propagate_nan=tl.PropagateNan.ALL))
    return tl.where(weight == 0.0, 0.0, -weight * tl.log2(1.0 - share + share * other))


@triton.jit(do_not_specialize=["N", "stride_stats"])
def _kl_kernel(
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
    REF_BK: tl.constexpr,
    BR: tl.constexpr,
    REF_BR: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    REF_TMA: tl.constexpr,
    OUT_TMA: tl.constexpr,
    OUT_TYPE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEGATE: tl.constexpr,
    REF_SOFTCAP: tl.constexpr,
    REF_NEGATE: tl.constexpr,
    MODE: tl.constexpr,
    KIND: tl.constexpr,
):
    num_m = (N + BM - 1) // BM
    num_n = (V + BN - 1) // BN
    pm, pn = place(tl.program_id(0), num_m, num_n, GROUP)
    y = raw_logits(
        ref_h,
        ref_w,
        ref_bias,
        ref_lora_u,
        ref_lora_b,
        pm * BM,
        pn * BN,
        N,
        V,
        ref_D,
        ref_R,
        ref_pre,
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
        REF_BK,
        REF_BR,
        REF_TMA,
        REF_SOFTCAP,
        REF_NEGATE,
    )
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
def _fold_kernel(
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


def _fold(parts: Tensor, f: Tensor, ref_f: Tensor, kind: int) -> Tensor:
    """[5, tiles, >= m] of tiles, or of ranks, to [5, m], in a fixed order."""
    out = parts.new_empty(5, f.shape[0])
    if f.shape[0]:
        strides = (parts.stride(0), parts.stride(1), out.stride(0))
        grid = (ceil_div(f.shape[0], 16),)
        _fold_kernel[grid](
            parts, f, ref_f, out, f.shape[0], parts.shape[1], *strides, BLOCK=16, PART=64, KIND=kind, num_warps=4
        )
    return out


def _tile(work: Work) -> Tile:
    """Two accumulators a program, so twice the warps of the plain forward's; not measured."""
    if work.device.capability == INTERPRETED or work.operand == torch.float32:
        return work.config.forward
    depth = 64 if work.device.has_tma else 32
    return Tile(128, 128, depth, warps=8, stages=3, per_sm=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """Both problems as the kernels read them."""

    work: Work
    ref: Work
    kind: int
    beta: float

    @classmethod
    def of(cls, student: Problem, teacher: Problem, direction: str, beta: float) -> Pair:
        return cls(Work(student), Work(teacher), KINDS[direction], beta)

    @property
    def tile(self) -> Tile:
        """One that fits both operands."""
        tiles = (_tile(self.work), _tile(self.ref))
        return min(tiles, key=lambda tile: tile.rows * tile.columns)

    @property
    def chunk(self) -> int:
        """Tokens whose partial statistics fit the workspace; by all ranks' vocabulary, which must chunk alike."""
        p = self.work.problem
        fit = p.workspace_bytes // (20 * max(ceil_div(p.vocab_size, self.tile.columns), 1))
        return max(16, min(CHUNK, fit) // 16 * 16)

    def launch(
        self, mode: int, rows: Rows, ref_rows: Rows, heads: tuple[Head, Head], stats: Tensor, up: Tensor, out: Tensor
    ) -> None:
        """A tile of both heads each, into parts [5, tiles, >= m] or dz [m, C]."""
        (head, ref_head), tile = heads, self.tile
        programs = ceil_div(rows.count, tile.rows) * ceil_div(head.valid, tile.columns)
        if not programs:
            return
        h, w, tma = _operands(self.work, rows, head, tile)
        ref_h, ref_w, ref_tma = _operands(self.ref, ref_rows, ref_head, tile)
        target = None
        if mode == DZ and self.work.device.has_tma:
            target = descriptor(out, [tile.rows, tile.columns // 2])
        _kl_kernel[(programs,)](
            h,
            w,
            head.bias,
            rows.lora_u,
            head.lora_b,
            rows.f,
            ref_h,
            ref_w,
            ref_head.bias,
            ref_rows.lora_u,
            ref_head.lora_b,
            ref_rows.f,
            stats,
            up,
            out if target is None else target,
            rows.count,
            head.valid,
            head.hidden_size,
            head.rank,
            ref_head.hidden_size,
            ref_head.rank,
            head.pre,
            ref_head.pre,
            self.beta,
            *rows.hidden.stride(),
            *head.weight.stride(),
            *rows.lora_strides,
            *head.lora_strides,
            *ref_rows.hidden.stride(),
            *ref_head.weight.stride(),
            *ref_rows.lora_strides,
            *ref_head.lora_strides,
            stats.stride(0),
            out.stride(0),
            out.stride(1),
            BM=tile.rows,
            BN=tile.columns,
            BK=tile.depth,
            REF_BK=tile.depth,
            BR=_rank_block(head),
            REF_BR=_rank_block(ref_head),
            GROUP=tile.group,
            TMA=tma,
            REF_TMA=ref_tma,
            OUT_TMA=target is not None,
            OUT_TYPE=TYPES[out.dtype],
            SOFTCAP=head.softcap,
            NEGATE=head.negate,
            REF_SOFTCAP=ref_head.softcap,
            REF_NEGATE=ref_head.negate,
            MODE=mode,
            KIND=self.kind,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _rank_block(head: Head) -> int:
    return max(16, min(64, triton.next_power_of_2(head.rank))) if head.rank else 16


def _operands(work: Work, rows: Rows, head: Head, tile: Tile):
    """hidden and weight as TMA descriptors where they can be, or the tensors."""
    if work.device.has_tma:
        h = descriptor(rows.hidden, [tile.rows, tile.depth])
        w = descriptor(head.weight[: head.valid], [tile.columns, tile.depth])
        if h is not None and w is not None:
            return h, w, True
    return rows.hidden, head.weight, False


def kl_forward(student: Problem, teacher: Problem, *, direction: str, beta: float) -> tuple[Tensor, Tensor]:
    """Divergences [n] and, for the backward, M and log2 S of both and what p's slope is relative to: [5, n]."""
    pair = Pair.of(student, teacher, direction, beta)
    work, n = pair.work, pair.work.n
    value, stats = work.empty(n), work.empty(5, n)
    for start in range(0, n, pair.chunk):
        stop = min(start + pair.chunk, n)
        value[start:stop] = _score(pair, work.rows(start, stop), pair.ref.rows(start, stop), stats[:, start:stop])
    return value, stats


def _score(pair: Pair, rows: Rows, ref_rows: Rows, stats: Tensor) -> Tensor:
    """Divergences [m] of a block of rows; fills their statistics."""
    work, group, heads = pair.work, pair.work.problem.group, (pair.work.head, pair.ref.head)

    def sweep(mode: int, kind: int) -> Tensor:
        tiles = ceil_div(work.head.valid, pair.tile.columns)
        # A stride that 16 divides, whatever m is, as in the forward.
        parts = work.empty(5, tiles, ceil_div(rows.count, 16) * 16)
        if mode == MIXTURE:
            parts.zero_()  # at maxima of 0 the fold is a sum
        pair.launch(mode, rows, ref_rows, heads, stats, stats, parts)
        own = _fold(parts, rows.f, ref_rows.f, kind)
        return own if group is None else _fold(gather_stacked(own, group).transpose(0, 1), rows.f, ref_rows.f, kind)

    stats.copy_(sweep(STATISTICS, pair.kind))
    sums, gap = stats[2:4].clone(), stats[4].clone()
    sums_log = sums.log2()
    stats[2:4] = sums_log
    if pair.kind == JSD:
        shares = sweep(MIXTURE, REVERSE)[2:4].clamp_(min=0.0) * LN2
        stats[4] = shares[0]
        return pair.beta * shares[1] + (1.0 - pair.beta) * shares[0]
    weigh = 1 if pair.kind == FORWARD else 0
    value = ((gap / sums[weigh] + (sums_log[1 - weigh] - sums_log[weigh])) * LN2).clamp_(min=0.0)
    stats[4] = value
    return value


def kl_backward(
    student: Problem,
    teacher: Problem,
    stats: Tensor,
    grad: Tensor,
    needs: Needs,
    *,
    direction: str,
    beta: float,
) -> Gradients:
    """The student's gradients for upstream [n]; the products of those that nobody needs are not run."""
    pair = Pair.of(student, teacher, direction, beta)
    work = pair.work
    sums = Sums(work, needs, None)
    if not work.n:
        return sums.finish()
    rows, ref_rows = work.rows(0, work.n), pair.ref.rows(0, work.n)
    # |p·(ln(p/q) − KL)| is at most KL + 1: what float16's dz must have room for.
    bound = grad if pair.kind == FORWARD else grad * (1.0 + stats[4])
    dz_scale = pass_scale(work, rows, (bound, None))
    sums.begin_pass(dz_scale)
    up = rows.f * grad * (work.head.slope * (1.0 - beta if pair.kind == JSD else 1.0))
    up = up if dz_scale is None else up * dz_scale
    valid = work.head.valid
    blocks = Blocks.plan(work.n, valid, work.head.hidden_size, work.item, student.workspace_bytes, sums.tiled(1))
    spans = blocks.of_tokens(work.n)
    buffer = work.empty(min(blocks.tokens, work.n), blocks.columns, dtype=work.operand)
    for start, stop in blocks.of_columns(0, valid):
        sums.open(start, stop, len(spans))
        heads = (work.head.columns(start, stop), pair.ref.head.columns(start, stop))
        for begin, end in spans:
            span, dz = rows.span(begin, end), buffer[: end - begin, : stop - start]
            pair.launch(DZ, span, ref_rows.span(begin, end), heads, stats[:, begin:end], up[begin:end], dz)
            sums.add(dz, span, begin, start)
        sums.close(start, stop)
    sums.end_pass(0, work.n)
    return sums.finish()
