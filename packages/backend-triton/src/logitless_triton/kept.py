"""What the forward keeps so that the backward recomputes less: the leading vocab columns, as many as fit.

Two ways, told apart by the buffer's length (nothing else reaches the backward without a copy from the device):

DIFFERENCES   d = (x − m)·f of each tile in fp16 (fp32 for fp32 inputs), and the tiles' maxima m. Serves every head and
              both gradients; the backward turns d into dz. In fp16 d is at the floor that rounding dz to bf16 sets,
              entropy-only gradients included; e^d in bf16 is not.
EXPONENTIALS  E = 2^((x − x_label)·f − 32) in the weight's dtype, the operand of the products as it is:
                  d_weight = Eᵀ·(s·h)      d_hidden = s·(E·W)      s = −g·(dx)/Σ E
              with the label's element overwritten by (p − 1)·Σ E. Only where the entropy needs no gradient, for plain
              bf16 and fp32 heads (fp16 has no range for it). Those hold 2^127: rows whose Σ E would come near it
              (log_prob below −67 nats) are made again relative to their maximum, by `_mend_kernel`, which leaves at
              once where a tile has none.

A backward only reads the buffer, unless it is the last through its graph: then d turns into dz in place.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless_triton.layout import DIFFERENCES, EXPONENTIALS, NOTHING, buffer_bytes, mode_of, tiles_that_fit
from logitless_triton.tile import FLOOR, ceil_div, expm1, factor_args, factor_of, raw_logits

__all__ = [
    "DIFFERENCES",
    "EXPONENTIALS",
    "NOTHING",
    "SHIFT",
    "Kept",
    "finish_exponentials",
]

SHIFT = 32.0  # log2 by which E's reference lies above the label: room for what is likelier, and for what is less
FAR = tl.constexpr(64.0)  # log2 Σ E above which a row is made again; the products' sums need the rest of the range


@dataclass(slots=True)
class Kept:
    """The buffer's parts for a block of rows."""

    mode: int = NOTHING
    columns: int = 0  # leading vocab rows that are kept
    width: int = 1  # columns of a tile
    body: Tensor | None = None  # [m, whole tiles]
    maxima: Tensor | None = None  # [tiles, >= m] float32: DIFFERENCES
    offsets: Tensor | None = None  # [m] float32, log2 Σ E: EXPONENTIALS

    @classmethod
    def of(cls, work: Any, buffer: Tensor, n: int, mode: int | None = None, *, fill: bool = False) -> Kept:
        """The parts of a uint8 buffer that is to serve n rows; `fill` zeroes what no kernel will write."""
        mode = mode_of(buffer.shape[0]) if mode is None else mode
        width = work.config.forward.columns
        tiles = tiles_that_fit(buffer.shape[0], n, width, work.item, mode, work.head.valid)
        if not tiles:
            if fill:
                buffer.zero_()
            return cls()
        padded, columns = ceil_div(n, 16) * 16, min(tiles * width, work.head.valid)
        end = n * tiles * width * work.item  # of the body; a multiple of 128, whatever n is
        if fill:
            buffer[end:].zero_()
        dtype = torch.float16 if mode == DIFFERENCES and work.item == 2 else work.operand
        body = buffer.view(dtype).as_strided((n, tiles * width), (tiles * width, 1))
        numbers = buffer.view(torch.float32)
        if mode == DIFFERENCES:
            maxima = numbers.as_strided((tiles, padded), (padded, 1), end // 4)
            return cls(mode, columns, width, body, maxima=maxima)
        return cls(mode, columns, width, body, offsets=numbers.as_strided((n,), (1,), end // 4))

    @staticmethod
    def buffer(work: Any, n: int) -> Tensor:
        """A buffer that keeps the differences of n rows in all columns."""
        width = work.config.forward.columns
        tiles = ceil_div(work.head.valid, width)
        return work.empty(buffer_bytes(tiles, n, width, work.item, DIFFERENCES), dtype=torch.uint8)

    @property
    def values(self) -> Tensor:
        """[m, columns]: the body, less what its last tile has beyond them; without a view, as in `part`, if it can."""
        return self.body if self.body.shape[1] == self.columns else self.body[:, : self.columns]

    def span(self, start: int, stop: int) -> Kept:
        """The parts of some of the rows."""
        if self.mode == NOTHING:
            return self
        return replace(
            self,
            body=self.body[start:stop],
            maxima=None if self.maxima is None else self.maxima[:, start:],
            offsets=None if self.offsets is None else self.offsets[start:stop],
        )


@triton.jit(do_not_specialize=["N", "all_tokens"])
def _mend_kernel(
    h,
    w,
    live_count,
    kept,
    f_ptr,
    f_value,
    reference_ptr,
    label_ptr,
    stats,
    N,
    all_tokens,
    V,
    D,
    kept_columns,
    stride_hn,
    stride_hd,
    stride_wv,
    stride_wd,
    stride_kept,
    stride_stats,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NEGATE: tl.constexpr,
):
    row0 = tl.program_id(0) * BM
    rows = row0 + tl.arange(0, BM)
    inside = rows < N
    f = factor_of(f_ptr, f_value, rows, inside, BM)
    M = tl.load(stats + rows, mask=inside, other=0.0)
    log_s = tl.load(stats + stride_stats + rows, mask=inside, other=0.0)
    reference = tl.load(reference_ptr + rows, mask=inside, other=0.0)
    far = inside & ((M - reference) * f + log_s > FAR)
    if live_count is not None:  # else these statistics are of nothing
        far = far & (tl.load(live_count) == all_tokens)
    if tl.max(far.to(tl.int32), 0) > 0:
        for col0 in range(tl.program_id(1) * BN, kept_columns, tl.num_programs(1) * BN):
            x = raw_logits(
                h,
                w,
                None,
                None,
                None,
                row0,
                col0,
                N,
                V,
                D,
                0,
                1.0,
                stride_hn,
                stride_hd,
                stride_wv,
                stride_wd,
                0,
                0,
                0,
                0,
                BM,
                BN,
                BK,
                16,
                False,
                False,
                NEGATE,
            )
            d = tl.maximum((x - M[:, None]) * f[:, None], FLOOR, propagate_nan=tl.PropagateNan.ALL)
            cols = col0 + tl.arange(0, BN)
            at = rows.to(tl.int64)[:, None] * stride_kept + cols[None, :]
            tl.store(
                kept + at, tl.exp2(d).to(kept.dtype.element_ty), mask=far[:, None] & (cols < kept_columns)[None, :]
            )


@triton.jit
def _seal_kernel(
    kept, f_ptr, f_value, reference_ptr, label_ptr, stats, offset_ptr, kept_columns, stride_kept, stride_stats
):
    row = tl.program_id(0).to(tl.int64)
    log_s = tl.load(stats + stride_stats + row)
    log_prob = tl.load(stats + 3 * stride_stats + row)
    f = tl.load(f_ptr + row) if f_ptr is not None else f_value
    offset = (tl.load(stats + row) - tl.load(reference_ptr + row)) * f + log_s
    offset = tl.where(offset > FAR, log_s, offset)
    tl.store(offset_ptr + row, offset)
    label = tl.load(label_ptr + row)
    value = expm1(log_prob) * tl.exp2(offset)
    tl.store(
        kept + row * stride_kept + label, value.to(kept.dtype.element_ty), mask=(label >= 0) & (label < kept_columns)
    )


def finish_exponentials(work: Any, rows: Any, kept: Kept, reference: Tensor, stats: Tensor) -> None:
    """Once a block's normalisers are known: mend the rows out of range, write the labels' elements and the offsets."""
    if not rows.count:
        return
    head, tile = work.head, work.config.forward
    shared = (kept.body, *factor_args(rows.factor), reference, rows.labels, stats)
    grid = (ceil_div(rows.count, tile.rows), min(32, ceil_div(kept.columns, tile.columns)))
    _mend_kernel[grid](
        rows.hidden,
        head.weight,
        work.problem.live_count,
        *shared,
        rows.count,
        work.n,
        head.valid,
        head.hidden_size,
        kept.columns,
        *rows.hidden.stride(),
        *head.weight.stride(),
        kept.body.stride(0),
        stats.stride(0),
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        NEGATE=head.negate,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    _seal_kernel[(rows.count,)](*shared, kept.offsets, kept.columns, kept.body.stride(0), stats.stride(0), num_warps=1)
