"""Forward: one pass over the logits' tiles, each reduced to three numbers a row; nothing [n, V] is held.

    m = max x      s = Σ 2^((x − m)·f)      t = Σ 2^((x − m)·f)·(x − m)·f          x, f: see tile.py

Where the backward is to recompute less, the leading columns' values are stored on the way (`logitless_triton.kept`).
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.collectives import gather_stacked
from logitless.types import Forwarded, Problem
from logitless_triton.combine import combine, label_logits
from logitless_triton.config import Tile
from logitless_triton.kept import DIFFERENCES, EXPONENTIALS, NOTHING, Kept, finish_exponentials
from logitless_triton.layout import LOGITS
from logitless_triton.rows import Rows, Work
from logitless_triton.tile import (
    FLOOR,
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

__all__ = ["Scores", "forward", "forward_pass", "operands", "scan"]

_DIFFERENCES, _EXPONENTIALS, _LOGITS = (tl.constexpr(x) for x in (DIFFERENCES, EXPONENTIALS, LOGITS))


@triton.jit(do_not_specialize=["N", "all_tokens"])
def _forward_kernel(
    h,
    w,
    kept,
    live_count,
    bias,
    lora_u,
    lora_b,
    f_ptr,
    f_value,
    reference_ptr,
    parts,
    maxima,
    N,
    all_tokens,
    V,
    D,
    R,
    kept_columns,
    pre,
    stride_hn,
    stride_hd,
    stride_wv,
    stride_wd,
    stride_un,
    stride_ur,
    stride_bv,
    stride_br,
    stride_kind,
    stride_tile,
    stride_maxima,
    stride_kept,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TMA: tl.constexpr,
    TMA_KEPT: tl.constexpr,
    FLATTEN: tl.constexpr,
    KEEP: tl.constexpr,
    KEPT_TYPE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEGATE: tl.constexpr,
    INFINITE: tl.constexpr,
):
    num_m = (N + BM - 1) // BM
    num_n = (V + BN - 1) // BN
    tiles = num_m * num_n
    if live_count is not None:  # launched before the host knew; unless every token is live, it is done again
        tiles = tl.where(tl.load(live_count) == all_tokens, tiles, 0)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN):
        pm, pn = place(tile, num_m, num_n, GROUP)
        rows = pm * BM + tl.arange(0, BM)
        inside = rows < N
        if KEEP == _EXPONENTIALS:  # asked for here, it is there when the products are
            reference = tl.load(reference_ptr + rows, mask=inside, other=0.0)
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
        cols = pn * BN + tl.arange(0, BN)
        f = factor_of(f_ptr, f_value, rows, inside, BM)
        x = tl.where(cols[None, :] < V, x, LOWEST)
        m = tl.maximum(tl.max(x, 1), LOWEST)  # finite: −inf − −inf would be NaN
        d = (x - m[:, None]) * f[:, None]
        if INFINITE:  # 0·(−inf) would be NaN
            d = tl.maximum(d, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        e = tl.exp2(d)  # [BM, BN]
        s = tl.sum(e, 1)
        t = tl.sum(e * d, 1)
        if KEEP > 0:
            if KEEP == _DIFFERENCES:
                q = d.to(KEPT_TYPE)
                at = pn.to(tl.int64) * stride_maxima + rows
                tl.store(maxima + at, m, mask=rows < tl.where(pn * BN < kept_columns, N, 0))
            elif KEEP == _LOGITS:
                q = x
            else:
                above = (m - reference) * f
                q = (e * tl.exp2(tl.minimum(above, 126.0))[:, None]).to(KEPT_TYPE)
            if TMA_KEPT:
                left, right = halves(q, BM, BN)
                if KEEP == _LOGITS:  # twice as wide as what is kept in half precision, so in quarters
                    first, second = halves(left, BM, BN // 2)
                    kept.store([pm * BM, pn * BN], first)
                    kept.store([pm * BM, pn * BN + BN // 4], second)
                    third, fourth = halves(right, BM, BN // 2)
                    kept.store([pm * BM, pn * BN + BN // 2], third)
                    kept.store([pm * BM, pn * BN + BN // 4 * 3], fourth)
                else:
                    kept.store([pm * BM, pn * BN], left)
                    kept.store([pm * BM, pn * BN + BN // 2], right)
            else:
                at = rows.to(tl.int64)[:, None] * stride_kept + cols[None, :]
                tl.store(kept + at, q, mask=inside[:, None] & (cols < kept_columns)[None, :])
        at = pn.to(tl.int64) * stride_tile + rows
        tl.store(parts + at, m, mask=inside)
        tl.store(parts + stride_kind + at, s, mask=inside)
        tl.store(parts + 2 * stride_kind + at, t, mask=inside)


def scan(work: Work, rows: Rows, kept: Kept, reference: Tensor | None, parts: Tensor) -> None:
    """Partial statistics [3, tiles, >= m] of a block of rows, and what is kept of them."""
    head, tile = work.head, work.config.forward
    tiles = ceil_div(rows.count, tile.rows) * parts.shape[1]
    if not tiles:
        return
    h, w, tma = operands(work, rows, tile)
    body, tma_kept = kept.body, False
    if tma and kept.mode != NOTHING:
        body = descriptor(kept.body, [tile.rows, tile.columns // (4 if kept.mode == LOGITS else 2)])
        tma_kept = True
    _forward_kernel[(min(work.programs(tile), tiles),)](
        h,
        w,
        body,
        work.problem.live_count,
        head.bias,
        rows.lora_u,
        head.lora_b,
        *factor_args(rows.factor),
        reference,
        parts,
        kept.maxima,
        rows.count,
        work.n,
        head.valid,
        head.hidden_size,
        head.rank,
        0 if kept.body is None else kept.body.shape[1],
        head.pre,
        *rows.hidden.stride(),
        *head.weight.stride(),
        *rows.lora_strides,
        *head.lora_strides,
        parts.stride(0),
        parts.stride(1),
        kept.maxima.stride(0) if kept.maxima is not None else 0,
        kept.body.stride(0) if kept.body is not None else 0,
        TMA=tma,
        TMA_KEPT=tma_kept,
        FLATTEN=tma and not head.rank,
        KEEP=kept.mode,
        KEPT_TYPE=TYPES[kept.body.dtype] if kept.body is not None else tl.float32,
        INFINITE=head.bias is not None,
        **work.multiplying(tile),
    )
    if kept.mode == LOGITS and work.problem.settle is not None:  # they are read next: were they made at all?
        work.problem.settle()


def operands(work: Work, rows: Rows, tile: Tile):
    """hidden and weight as the kernels take them: TMA descriptors, or the tensors."""
    if work.device.has_tma:
        valid = work.head.weight[: work.head.valid]
        h = descriptor(rows.hidden, [tile.rows, tile.depth])
        w = descriptor(valid, [tile.columns, tile.depth])
        if h is not None and w is not None:
            return h, w, True
    return rows.hidden, work.head.weight, False


class Scores:
    """Scores of n tokens, as they are filled in."""

    def __init__(self, work: Work, n: int) -> None:
        self.stats = work.empty(4, n)
        self.log_prob, self.entropy = work.empty(n), work.empty(n)


def forward_pass(work: Work, rows: Rows, kept: Kept, scores: Scores, start: int) -> None:
    """Score a block of rows, the tokens from `start` on; keep what `kept` has room for."""
    p, head = work.problem, work.head
    stop = start + rows.count
    label, reference = work.empty(rows.count), None
    if kept.mode == EXPONENTIALS:
        reference = work.empty(rows.count)
        label_logits(rows, head, label, reference, interpreted=work.interpreted)
    tiles = ceil_div(head.valid, work.config.forward.columns)
    # A stride that 16 divides, whatever m is: Triton specialises on that, and other code sums in another order.
    parts = work.empty(3, tiles, ceil_div(rows.count, 16) * 16)
    scan(work, rows, kept, reference, parts)
    if kept.mode != EXPONENTIALS:  # after the long kernel, so that it starts the sooner
        label_logits(rows, head, label, interpreted=work.interpreted)
    stats, outputs = scores.stats[:, start:stop], (scores.log_prob[start:stop], scores.entropy[start:stop])
    if p.group is not None:
        own = work.empty(4, parts.shape[2])
        combine(parts, label, rows.factor, own, *outputs, p.vocab_size, finish=False)
        own[3, : rows.count] = label
        ranks = gather_stacked(own, p.group)  # [size, 4, >= m]
        parts, label = ranks.transpose(0, 1), ranks[:, 3, : rows.count].amax(0)
    combine(parts, label, rows.factor, stats, *outputs, p.vocab_size)
    if kept.mode == EXPONENTIALS:
        finish_exponentials(work, rows, kept, reference, stats)


def forward(problem: Problem, *, entropy: bool, entropy_grad: bool, kept_shape: tuple[int, ...]) -> Forwarded:
    """Scores of the live tokens, by chunks of them; keeps what fits in `kept_shape`."""
    work = Work(problem)
    buffer = work.empty(*kept_shape, dtype=torch.uint8)
    kept = Kept.of(work, buffer, work.n, fill=True)
    scores, chunk = Scores(work, work.n), work.partials_rows
    for start in range(0, work.n, chunk):
        stop = min(start + chunk, work.n)
        forward_pass(work, work.rows(start, stop), kept.span(start, stop), scores, start)
    return Forwarded(scores.log_prob, scores.entropy if entropy else None, scores.stats, buffer)
