"""The k largest logits of each row, of the logits that a chunk holds; equals `logitless.reference.top_k_log_probs`.

The k-th largest is found as a kept set's threshold is (`logitless_triton.shortlist`), by each rank among its own; what
is larger is written out in the order of the vocabulary, and after it of the equal ones as many as there is room for.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.collectives import gather_stacked
from logitless.types import Problem
from logitless_triton.candidates import listed, normalisers
from logitless_triton.held import Held
from logitless_triton.listing import blocks, tile_logits
from logitless_triton.rows import Rows, Work
from logitless_triton.shortlist import find
from logitless_triton.threshold import SUMS
from logitless_triton.tile import LOWEST

__all__ = ["top_k_log_probs"]

LAST = torch.iinfo(torch.int64).max  # an id after all others: a place that is not filled


@triton.jit(do_not_specialize=["N", "V", "k", "stride_ids", "stride_held"])
def _best_kernel(
    held,
    ids,
    count_ptr,
    threshold_ptr,
    value_ptr,
    id_ptr,
    N,
    V,
    k,
    stride_ids,
    stride_held,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = rows < N
    threshold = tl.load(threshold_ptr + rows, mask=inside, other=0.0)[:, None]
    count = tl.load(count_ptr + rows, mask=inside, other=0)
    tiles = tl.max(count, 0)
    larger = tl.full((ROWS, BLOCK), 0, tl.int32)
    for first in range(0, tiles, BLOCK // WIDTH):
        x, _, _ = tile_logits(held, ids, rows, first, count, stride_held, stride_ids, WIDTH, BLOCK)
        x = tl.reshape(x, (ROWS, BLOCK))
        larger += (x > threshold).to(tl.int32)
    next_larger = tl.full((ROWS,), 0, tl.int32)
    next_equal = tl.sum(larger, 1)
    for first in range(0, tiles, BLOCK // WIDTH):
        x, cols, listed = tile_logits(held, ids, rows, first, count, stride_held, stride_ids, WIDTH, BLOCK)
        x = tl.reshape(x, (ROWS, BLOCK))
        real = tl.reshape(listed & (cols < V), (ROWS, BLOCK))
        cols = tl.reshape(cols, (ROWS, BLOCK))
        is_larger = (x > threshold).to(tl.int32)
        is_equal = (real & (x == threshold)).to(tl.int32)
        larger_slot = next_larger[:, None] + tl.cumsum(is_larger, 1) - 1
        equal_slot = next_equal[:, None] + tl.cumsum(is_equal, 1) - 1
        slot = tl.where(is_larger > 0, larger_slot, equal_slot)
        chosen = (is_larger + is_equal > 0) & (slot < k)
        tl.store(value_ptr + rows[:, None] * k + slot, x, mask=chosen)
        tl.store(id_ptr + rows[:, None] * k + slot, cols.to(tl.int64), mask=chosen)
        next_larger += tl.sum(is_larger, 1)
        next_equal += tl.sum(is_equal, 1)


def _of_rows(held: Held, rows: Rows, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of a block of rows: M and S [2, m] of all ranks, and this rank's largest x and their ids [m, k]."""
    work, m = held.work, rows.count
    parts, group = held.scan(rows), work.problem.group
    value, ids = work.empty(m, k).fill_(-math.inf), work.empty(m, k, dtype=torch.int64).fill_(LAST)
    found = min(k, work.head.valid)
    if m and found:
        logits, whole, bracket = listed(work, held.of(rows), rows.f, parts, None, k=found, p=None)
        threshold, sums = work.empty(m), work.empty(len(SUMS), m)
        find(logits, bracket, torch.full_like(rows.f, float(found)), threshold, sums, summed=0, count=True)
        logits.launch(_best_kernel, threshold, value, ids, k=k, V=work.head.valid, **blocks(work))
    else:  # a rank without columns
        whole = torch.stack((work.empty(m).fill_(LOWEST.value), work.empty(m).zero_()))
    if group is not None:
        whole = normalisers(gather_stacked(whole, group), rows.f)
    return whole, value, ids.where(ids == LAST, ids + work.problem.vocab_start)


def _ranked(held: Held, rows: Rows, k: int) -> tuple[Tensor, Tensor]:
    """Of a block of rows: all ranks' largest, in order; ids and log-probs [m, k]."""
    (top, total), value, ids = _of_rows(held, rows, k)
    group = held.work.problem.group
    if group is not None:
        value, ids = (gather_stacked(x, group).transpose(0, 1).flatten(1) for x in (value, ids))
    ids, order = ids.sort(1)
    value, by_value = value.gather(1, order).sort(dim=1, descending=True, stable=True)
    value, ids = value[:, :k], ids.gather(1, by_value[:, :k])
    missing = ids == LAST  # a row of NaN
    value, ids = value.masked_fill(missing, math.nan), ids.masked_fill(missing, 0)
    below = (value - top.unsqueeze(1)) * (rows.f * math.log(2.0)).unsqueeze(1)
    return ids, (below - (total - 1.0).log1p().unsqueeze(1)).clamp(max=0.0) + 0.0


def top_k_log_probs(problem: Problem, k: int) -> tuple[Tensor, Tensor]:
    """Ids [n, k] and log-probs [n, k] of the k largest logits, largest first; of equal ones the lowest id first."""
    work = Work(problem, holds=True)
    held = Held(work, k)
    id_nk, log_prob_nk = work.empty(work.n, k, dtype=torch.int64), work.empty(work.n, k)
    for start, stop in held.spans():
        id_nk[start:stop], log_prob_nk[start:stop] = _ranked(held, work.rows(start, stop), k)
    return id_nk, log_prob_nk
