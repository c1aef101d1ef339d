"""The least logit that a token keeps, and sums over the kept ones, from logits that are held.

The threshold t of a kept set {x >= t} is searched for among the floats from a floor to M, in the order of their bits,
which holds ties exactly: a round finds the mass (or the number) of the logits at or above seven levels, and with it an
eighth of the interval; the largest and the least logit within say when only one is left. The rounds are launches, so
that ranks which share a vocabulary can add up their masses in between. Only the tiles of `logitless_triton.candidates`
are read.

A program serves one row (in the interpreter, whose time goes by programs, more), whose bits depend on nothing else.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.collectives import gather_stacked
from logitless_triton.candidates import Tiles, blocks, float_of, key_of, tile_columns
from logitless_triton.tile import FLOOR, ceil_div

__all__ = ["SUMS", "kept_sums", "search"]

ROUNDS = 11  # of an eighth each: 2^32 floats
SUMS = ("rest", "largest", "moment", "squares", "dropped")
"""Rows of `kept_sums`: Σ 2^((x−M)·f) of x < M, how many x are M, T and Σ 2^(2(x−M)·f) of what is kept, and the largest
x that is not."""


@triton.jit
def _levels(low, high):
    """[ROWS, 8] keys from the low one on, at equal distances."""
    way = tl.arange(0, 8).to(tl.int64)[None, :]
    return low[:, None] + (((high - low)[:, None] * way) >> 3)


@triton.jit
def _narrowed(low, high, found, wanted_ptr, rows, inside, N, RANKS: tl.constexpr, ROWS: tl.constexpr):
    """The keys [ROWS] between which the threshold lies, by what the last round found on each rank."""
    ways = tl.arange(0, 8)[None, :]
    level = _levels(low, high)
    mass = tl.full((ROWS, 8), 0.0, tl.float32)
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    least = tl.full((ROWS,), float("inf"), tl.float32)
    for rank in range(RANKS):
        at = found + rank * 10 * N + rows
        mass += tl.load(at[:, None] + ways * N, mask=inside[:, None], other=0.0)
        largest = tl.maximum(largest, tl.load(at + 8 * N, mask=inside, other=0.0))
        least = tl.minimum(least, tl.load(at + 9 * N, mask=inside, other=0.0))
    wanted = tl.load(wanted_ptr + rows, mask=inside, other=0.0)
    enough = (mass >= wanted[:, None]) | (ways == 0)
    new_low = tl.max(tl.where(enough, level, low[:, None]), 1)
    new_high = tl.min(tl.where(enough, high[:, None], level), 1)
    alone = largest == least  # the only logit between low and high
    new_low = tl.where(alone, key_of(largest), new_low)
    new_high = tl.where(alone, new_low + 1, new_high)
    is_open = high - low > 1  # else nothing was found, and what is read is not of this search
    return tl.where(is_open, new_low, low), tl.where(is_open, new_high, high)


@triton.jit(do_not_specialize=["N", "V", "stride_ids", "stride_held"])
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
    V,
    stride_ids,
    stride_held,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    COUNT: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    low = tl.load(before + rows, mask=inside, other=0)
    high = tl.load(before + N + rows, mask=inside, other=0)
    if RANKS > 0:
        low, high = _narrowed(low, high, found, wanted_ptr, rows, inside, N, RANKS, ROWS)
    tl.store(after + rows, low, mask=inside)  # not where it was read: another thread may not have read it yet
    tl.store(after + N + rows, high, mask=inside)
    is_open = high - low > 1
    if tl.max(is_open.to(tl.int32), 0) > 0:
        f = tl.load(f_ptr + rows, mask=inside, other=0.0)
        M = tl.load(M_ptr + rows, mask=inside, other=0.0)
        level = float_of(_levels(low, high))[:, :, None]  # [ROWS, 8, 1]
        bottom = float_of(low)[:, None]
        end = float_of(high)[:, None]
        mass = tl.full((ROWS, 8, BLOCK), 0.0, tl.float32)
        largest = tl.full((ROWS, BLOCK), -float("inf"), tl.float32)
        least = tl.full((ROWS, BLOCK), float("inf"), tl.float32)
        count = tl.load(count_ptr + rows, mask=is_open, other=0)
        for first in range(0, tl.max(count, 0), BLOCK // WIDTH):
            cols, real = tile_columns(ids, rows, first, count, V, stride_ids, WIDTH, BLOCK)
            x = tl.load(held + rows.to(tl.int64)[:, None] * stride_held + cols, mask=real, other=-float("inf"))
            weight = real.to(tl.float32) if COUNT else tl.exp2((x - M[:, None]) * f[:, None])
            mass += tl.where(x[:, None, :] >= level, weight[:, None, :], 0.0)
            largest = tl.maximum(largest, tl.where(x < end, x, -float("inf")))
            least = tl.minimum(least, tl.where(real & (x >= bottom), x, float("inf")))
        ways = tl.arange(0, 8)[None, :]
        tl.store(out + rows[:, None] + ways * N, tl.sum(mass, 2), mask=inside[:, None])
        tl.store(out + 8 * N + rows, tl.max(largest, 1), mask=inside)
        tl.store(out + 9 * N + rows, tl.min(least, 1), mask=inside)


def search(
    work: Any,
    held: Tensor,
    f: Tensor,
    tiles: Tiles,
    top: Tensor,
    bracket: Tensor,
    wanted: Tensor,
    group: Any,
    *,
    count: bool,
) -> Tensor:
    """[2, m] keys whose first is the threshold's: the largest t such that the logits at or above it are enough.

    Args:
        held: [m, whole tiles] this rank's logits.
        top: [m], M of all ranks.
        bracket: [2, m], of `listed`; it is left as it was.
        wanted: [m], Σ 2^((x−M)·f) that is enough; with `count`, a number of logits.
    """
    rows, ranks, sizes = f.shape[0], 0, blocks(work)
    found, out = work.empty(1, 10, rows), work.empty(1, 10, rows)
    after, spare = torch.empty_like(bracket), torch.empty_like(bracket)
    if not rows:
        return bracket
    for _ in range(ROUNDS + 1):  # the last one only reads what the one before it has found
        if not bracket.is_cuda and bool((bracket[1] - bracket[0] <= 1).all()):  # where looking costs nothing
            break
        _round_kernel[(ceil_div(rows, sizes["ROWS"]),)](
            held,
            tiles.ids,
            tiles.count,
            f,
            top,
            wanted,
            bracket,
            after,
            found,
            out,
            rows,
            work.head.valid,
            tiles.ids.stride(0),
            held.stride(0),
            RANKS=ranks,
            COUNT=count,
            **sizes,
        )
        bracket, after, spare = after, spare, after
        if group is None:
            found, out, ranks = out, found, 1
        else:
            found = gather_stacked(out[0], group)
            ranks = found.shape[0]
    return bracket


@triton.jit(do_not_specialize=["N", "V", "stride_ids", "stride_held", "stride_out"])
def _sums_kernel(
    held,
    ids,
    count_ptr,
    outside_ptr,
    f_ptr,
    M_ptr,
    bracket,
    threshold_ptr,
    out,
    N,
    V,
    stride_ids,
    stride_held,
    stride_out,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    least = float_of(tl.load(bracket + rows, mask=inside, other=0))
    f = tl.load(f_ptr + rows, mask=inside, other=0.0)[:, None]
    M = tl.load(M_ptr + rows, mask=inside, other=0.0)[:, None]
    threshold = least[:, None]
    rest = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    largest = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    moment = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    squares = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    dropped = tl.full((ROWS, BLOCK), -float("inf"), tl.float32)
    count = tl.load(count_ptr + rows, mask=inside, other=0)
    for first in range(0, tl.max(count, 0), BLOCK // WIDTH):
        cols, real = tile_columns(ids, rows, first, count, V, stride_ids, WIDTH, BLOCK)
        x = tl.load(held + rows.to(tl.int64)[:, None] * stride_held + cols, mask=real, other=-float("inf"))
        d = tl.maximum((x - M) * f, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        e = tl.where(x < threshold, 0.0, tl.exp2(d))  # NaN is kept, and seen
        moment += e * d
        squares += e * e
        rest += tl.where(x == M, 0.0, e)
        largest += tl.where(x == M, 1.0, 0.0)
        dropped = tl.maximum(dropped, tl.where(x < threshold, x, -float("inf")))
    below = tl.maximum(tl.max(dropped, 1), tl.load(outside_ptr + rows, mask=inside, other=0.0))
    tl.store(threshold_ptr + rows, least, mask=inside)
    tl.store(out + rows, tl.sum(rest, 1), mask=inside)
    tl.store(out + stride_out + rows, tl.sum(largest, 1), mask=inside)
    tl.store(out + 2 * stride_out + rows, tl.sum(moment, 1), mask=inside)
    tl.store(out + 3 * stride_out + rows, tl.sum(squares, 1), mask=inside)
    tl.store(out + 4 * stride_out + rows, below, mask=inside)


def kept_sums(
    work: Any,
    held: Tensor,
    f: Tensor,
    tiles: Tiles,
    top: Tensor,
    bracket: Tensor,
    threshold: Tensor,
    out: Tensor,
) -> None:
    """`SUMS` [5, m] of this rank into `out`, and into `threshold` [m] the float that `search` has found."""
    rows, sizes = f.shape[0], blocks(work)
    if rows:
        _sums_kernel[(ceil_div(rows, sizes["ROWS"]),)](
            held,
            tiles.ids,
            tiles.count,
            tiles.outside,
            f,
            top,
            bracket,
            threshold,
            out,
            rows,
            work.head.valid,
            tiles.ids.stride(0),
            held.stride(0),
            out.stride(0),
            **sizes,
        )
