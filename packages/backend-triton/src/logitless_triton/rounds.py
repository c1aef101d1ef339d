"""A search in rounds that are launches, so that ranks which share a vocabulary add up their masses in between."""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.collectives import gather_stacked
from logitless_triton.listing import Listing, blocks, factors, float_of, load_bracket, program_rows
from logitless_triton.threshold import LOOK, add_up, look, narrowed, store_sums

__all__ = ["kept_sums", "search"]

ROUNDS = 11  # of an eighth each: 2^32 floats


@triton.jit(do_not_specialize=["N", "stride_ids", "stride_held"])
def _round_kernel(
    held,
    ids,
    count_ptr,
    f_ptr,
    M_ptr,
    wanted_ptr,
    before,
    after,
    found,
    out,
    N,
    stride_ids,
    stride_held,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    COUNT: tl.constexpr,
):
    rows, inside = program_rows(N, ROWS)
    low, high = load_bracket(before, rows, N, inside)
    ways = tl.arange(0, 8)[None, :]
    if RANKS > 0:  # what the last round found on each rank
        mass = tl.full((ROWS, 8), 0.0, tl.float32)
        largest = tl.full((ROWS,), -float("inf"), tl.float32)
        least = tl.full((ROWS,), float("inf"), tl.float32)
        for rank in range(RANKS):
            at = found + rank * 10 * N + rows
            mass += tl.load(at[:, None] + ways * N, mask=inside[:, None], other=0.0)
            largest = tl.maximum(largest, tl.load(at + 8 * N, mask=inside, other=0.0))
            least = tl.minimum(least, tl.load(at + 9 * N, mask=inside, other=0.0))
        wanted = tl.load(wanted_ptr + rows, mask=inside, other=0.0)
        low, high, _, _ = narrowed(low, high, mass, largest, least, wanted, wanted, wanted, False)
    tl.store(after + rows, low, mask=inside)  # not where it was read: another thread may not have read it yet
    tl.store(after + N + rows, high, mask=inside)
    is_open = high - low > 1
    if tl.max(is_open.to(tl.int32), 0) > 0:
        f, M = factors(f_ptr, M_ptr, rows, inside)
        count = tl.load(count_ptr + rows, mask=is_open, other=0)
        source = (held, ids, stride_held, stride_ids)
        mass, largest, least = look(source, rows, count, f, M, low, high, f, f, False, False, WIDTH, ROWS, BLOCK, COUNT)
        tl.store(out + rows[:, None] + ways * N, mass, mask=inside[:, None])
        tl.store(out + 8 * N + rows, largest, mask=inside)
        tl.store(out + 9 * N + rows, least, mask=inside)


def search(logits: Listing, bracket: Tensor, wanted: Tensor, group: Any, *, count: bool) -> Tensor:
    """[m] keys of the thresholds: the largest t such that the logits at or above it are enough, of all ranks'.

    Args:
        bracket: [2, m], of `listed`; it is left as it was.
        wanted: [m], Σ 2^((x−M)·f) that is enough; with `count`, a number of logits.
    """
    work, ranks, sizes = logits.work, 0, blocks(logits.work, LOOK)
    found, out = work.empty(0), work.empty(10, wanted.shape[0])
    after, spare = torch.empty_like(bracket), torch.empty_like(bracket)
    for _ in range(ROUNDS + 1):  # the last one only reads what the one before it has found
        if not bracket.is_cuda and bool((bracket[1] - bracket[0] <= 1).all()):  # where looking costs nothing
            break
        own = (logits.f, logits.top, wanted, bracket, after, found, out)
        logits.launch(_round_kernel, *own, RANKS=ranks, COUNT=count, **sizes)
        bracket, after, spare = after, spare, after
        found = gather_stacked(out, group)
        ranks = found.shape[0]
    return bracket[0]


@triton.jit(do_not_specialize=["N", "stride_ids", "stride_held", "stride_out"])
def _sums_kernel(
    held,
    ids,
    count_ptr,
    outside_ptr,
    f_ptr,
    M_ptr,
    least_ptr,
    threshold_ptr,
    out,
    N,
    stride_ids,
    stride_held,
    stride_out,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows, inside = program_rows(N, ROWS)
    threshold = float_of(tl.load(least_ptr + rows, mask=inside, other=0))
    f, M = factors(f_ptr, M_ptr, rows, inside)
    count = tl.load(count_ptr + rows, mask=inside, other=0)
    source = (held, ids, stride_held, stride_ids)
    sums, _, _ = add_up(
        source, rows, count, f, M, threshold, threshold, rows, rows, 4, False, False, False, WIDTH, ROWS, BLOCK
    )
    rest, largest, moment, squares, dropped = sums
    dropped = tl.maximum(dropped, tl.load(outside_ptr + rows, mask=inside, other=0.0))
    tl.store(threshold_ptr + rows, threshold, mask=inside)
    store_sums(out, rows, inside, stride_out, (rest, largest, moment, squares, dropped))


def kept_sums(logits: Listing, least: Tensor, threshold: Tensor, out: Tensor) -> None:
    """`SUMS` [5, m] of this rank into `out`, and into `threshold` [m] the float that `search` has found."""
    own = (logits.outside, logits.f, logits.top, least, threshold, out)
    logits.launch(_sums_kernel, *own, stride_out=out.stride(0), **blocks(logits.work))
