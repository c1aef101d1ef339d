"""The least logit that a token keeps, and sums over the kept ones, from logits that are held.

The threshold t of a kept set {x >= t} is searched for among the floats from a floor to M, in the order of their bits,
which holds ties exactly: a round finds the mass (or the number) of the logits at or above seven levels, and with it an
eighth of the interval; the largest and the least logit within say when only one is left. Only the tiles of
`logitless_triton.candidates` are read.

Here the rounds are launches, so that ranks which share a vocabulary can add up their masses in between. On one rank
`logitless_triton.shortlist` makes them in one launch, and by other levels.

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
from logitless_triton.candidates import Tiles, blocks, float_of, key_of, tile_logits
from logitless_triton.tile import FLOOR, ceil_div

__all__ = ["LANES", "LOOK", "SUMS", "add_up", "kept_sums", "look", "narrowed", "search", "store_sums"]

ROUNDS = 11  # of an eighth each: 2^32 floats
LANES = tl.constexpr(128)  # threads of a program
LOOK = 1024  # logits of a row that are compared with the levels together: what fits the registers
SUMS = ("rest", "largest", "moment", "squares", "dropped")
"""Rows of `kept_sums`: Σ 2^((x−M)·f) of x < M, how many x are M, T and Σ 2^(2(x−M)·f) of what is kept, and the largest
x that is not."""


@triton.jit
def _key_at(low, high, way, VALUES: tl.constexpr):
    """The level of a way from 0, the low key, to 7: eighths; with VALUES six sevenths of the values, and the middle.

    Between a negative floor and a positive M most floats lie next to zero: there an eighth of the keys is little.
    """
    if VALUES:
        bottom = float_of(low)
        value = bottom + (float_of(high) - bottom) / 7.0 * way.to(tl.float32)
        at = tl.minimum(tl.maximum(key_of(value), low), high - 1)  # also of infinities and NaN
        key = tl.where(way == 0, low, tl.where(way == 7, low + ((high - low) >> 1), at))
    else:
        key = low + (((high - low) * way) >> 3)
    return key


@triton.jit
def narrowed(low, high, mass, largest, least, wanted, VALUES: tl.constexpr):
    """The keys [ROWS] between which the threshold lies, by what was found at or above the levels, and between them."""
    ways = tl.arange(0, 8).to(tl.int64)[None, :]
    level = _key_at(low[:, None], high[:, None], ways, VALUES)
    enough = (mass >= wanted[:, None]) | (ways == 0)
    new_low = tl.max(tl.where(enough, level, low[:, None]), 1)
    new_high = tl.min(tl.where(enough, high[:, None], level), 1)
    alone = largest == least  # the only logit between low and high
    new_low = tl.where(alone, key_of(largest), new_low)
    new_high = tl.where(alone, new_low + 1, new_high)
    is_open = high - low > 1  # else nothing was found, and what is read is not of this search
    return tl.where(is_open, new_low, low), tl.where(is_open, new_high, high)


@triton.jit
def _by_lane(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, BLOCK // LANES, LANES] of logits [ROWS, BLOCK // WIDTH, WIDTH]: a lane is what one thread has loaded.

    That is so where 4 warps load 16 bytes for each thread; the layout then changes nothing but names, and sums over the
    middle axis stay within a thread.
    """
    x = tl.reshape(x, (ROWS, BLOCK // (4 * LANES), 4 * LANES // WIDTH, WIDTH // 4, 4))
    return tl.reshape(tl.permute(x, (0, 1, 4, 2, 3)), (ROWS, BLOCK // LANES, LANES))


@triton.jit
def _logits(
    source,
    rows,
    step,
    count,
    missing,
    SHORT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Logits [ROWS, BLOCK // LANES, LANES] of a step through the listed tiles or the short list.

    Args:
        source: held logits, ids of tiles, V and both strides; SHORT: the short list, its length and how many each lane
            has [ROWS, LANES].
        count: [ROWS], of tiles; SHORT: of a lane's places.
        missing: what stands where there is none.
    """
    if SHORT:
        short, length, placed = source
        place = step * (BLOCK // LANES) + tl.arange(0, BLOCK // LANES)[None, :, None]
        at = short + rows.to(tl.int64)[:, None, None] * length + place * LANES + tl.arange(0, LANES)[None, None, :]
        x = tl.load(at, mask=place < count[:, None, None], other=missing)
        x = _by_lane(tl.where(place < placed[:, None, :], x, missing), ROWS, LANES, BLOCK)
    else:
        held, ids, V, stride_held, stride_ids = source
        first = step * (BLOCK // WIDTH)
        x, _, real = tile_logits(held, ids, rows, first, count, V, stride_held, stride_ids, WIDTH, BLOCK)
        x = _by_lane(tl.where(real, x, missing), ROWS, WIDTH, BLOCK)
    return x


@triton.jit
def _steps(count, SHORT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """How many it takes to go through."""
    EACH: tl.constexpr = BLOCK // (LANES if SHORT else WIDTH)
    return (tl.max(count, 0) + EACH - 1) // EACH


@triton.jit
def look(
    source,
    rows,
    count,
    f,
    M,
    low,
    high,
    SHORT: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Masses [ROWS, 8] (COUNT: numbers) at or above the levels; the largest x below high, and the least from low on."""
    bottom, end = float_of(low)[:, None, None], float_of(high)[:, None, None]
    ways = tl.arange(0, 8)[None, :, None]
    lines = ()
    for way in tl.static_range(8):
        lines += (float_of(_key_at(low, high, tl.full((ROWS,), way, tl.int64), VALUES))[:, None, None],)
    mass = tl.full((ROWS, 8, LANES), 0.0, tl.float32)
    largest = tl.full((ROWS, LANES), -float("inf"), tl.float32)
    least = tl.full((ROWS, LANES), float("inf"), tl.float32)
    for step in range(0, _steps(count, SHORT, WIDTH, BLOCK)):
        x = _logits(source, rows, step, count, float("nan"), SHORT, WIDTH, ROWS, BLOCK)  # at or above nothing
        weight = tl.full(x.shape, 1.0, tl.float32) if COUNT else tl.exp2((x - M[:, None, None]) * f[:, None, None])
        for way in tl.static_range(8):  # not as one more axis: its values would not fit the registers
            found = tl.sum(tl.where(x >= lines[way], weight, 0.0), 1)
            mass += tl.where(ways == way, found[:, None, :], 0.0)
        largest = tl.maximum(largest, tl.max(tl.where(x < end, x, -float("inf")), 1))
        least = tl.minimum(least, tl.min(tl.where(x >= bottom, x, float("inf")), 1))
    return tl.sum(mass, 2), tl.max(largest, 1), tl.min(least, 1)


@triton.jit
def add_up(
    source,
    rows,
    count,
    f,
    M,
    threshold,
    bottom,
    short,
    length,
    SHORT: tl.constexpr,
    LIST: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`SUMS` [ROWS] of x >= threshold, the last one of x < `bottom`; how many x are >= threshold; what is listed.

    LIST: the logits from `bottom` on and below the threshold are put into `short`, of so many places a row; each lane
    has places of its own, so that threads need not wait for one another: those it would need [ROWS, LANES].
    """
    scale, top = f[:, None, None], M[:, None, None]
    line, edge = threshold[:, None, None], bottom[:, None, None]
    rest = tl.full((ROWS, LANES), 0.0, tl.float32)
    largest = tl.full((ROWS, LANES), 0.0, tl.float32)
    moment = tl.full((ROWS, LANES), 0.0, tl.float32)
    squares = tl.full((ROWS, LANES), 0.0, tl.float32)
    dropped = tl.full((ROWS, LANES), -float("inf"), tl.float32)
    number = tl.full((ROWS, LANES), 0, tl.int32)
    placed = tl.full((ROWS, LANES), 0, tl.int32)
    own = rows.to(tl.int64)[:, None, None] * length + tl.arange(0, LANES)[None, None, :]
    for step in range(0, _steps(count, SHORT, WIDTH, BLOCK)):
        x = _logits(source, rows, step, count, -float("inf"), SHORT, WIDTH, ROWS, BLOCK)
        d = tl.maximum((x - top) * scale, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        kept = (x < line) == 0  # NaN is, and seen
        e = tl.where(kept, tl.exp2(d), 0.0)
        moment += tl.sum(e * d, 1)
        squares += tl.sum(e * e, 1)
        rest += tl.sum(tl.where(x == top, 0.0, e), 1)
        largest += tl.sum(tl.where(kept & (x == top), 1.0, 0.0), 1)  # LIST: the threshold may be above M
        dropped = tl.maximum(dropped, tl.max(tl.where(x < edge, x, -float("inf")), 1))
        if LIST:
            number += tl.sum((x >= line).to(tl.int32), 1)
            chosen = (x >= edge) & (x < line)
            place = placed[:, None, :] + tl.cumsum(chosen.to(tl.int32), 1) - 1
            room = chosen & (place < length // LANES)
            # With one axis only, all compilers agree on which thread has what: nothing is moved.
            at = tl.reshape(own + place * LANES, (ROWS * BLOCK,))
            tl.store(short + at, tl.reshape(x, (ROWS * BLOCK,)), mask=tl.reshape(room, (ROWS * BLOCK,)))
            placed += tl.sum(chosen.to(tl.int32), 1)
    return (
        tl.sum(rest, 1),
        tl.sum(largest, 1),
        tl.sum(moment, 1),
        tl.sum(squares, 1),
        tl.max(dropped, 1),
        tl.sum(number, 1),
        placed,
    )


@triton.jit
def store_sums(out, rows, inside, stride_out, rest, largest, moment, squares, dropped):
    """Put [ROWS] of each of `SUMS` into its row."""
    tl.store(out + rows, rest, mask=inside)
    tl.store(out + stride_out + rows, largest, mask=inside)
    tl.store(out + 2 * stride_out + rows, moment, mask=inside)
    tl.store(out + 3 * stride_out + rows, squares, mask=inside)
    tl.store(out + 4 * stride_out + rows, dropped, mask=inside)


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
        low, high = narrowed(low, high, mass, largest, least, wanted, False)
    tl.store(after + rows, low, mask=inside)  # not where it was read: another thread may not have read it yet
    tl.store(after + N + rows, high, mask=inside)
    is_open = high - low > 1
    if tl.max(is_open.to(tl.int32), 0) > 0:
        f = tl.load(f_ptr + rows, mask=inside, other=0.0)
        M = tl.load(M_ptr + rows, mask=inside, other=0.0)
        count = tl.load(count_ptr + rows, mask=is_open, other=0)
        source = (held, ids, V, stride_held, stride_ids)
        mass, largest, least = look(source, rows, count, f, M, low, high, False, False, WIDTH, ROWS, BLOCK, COUNT)
        tl.store(out + rows[:, None] + ways * N, mass, mask=inside[:, None])
        tl.store(out + 8 * N + rows, largest, mask=inside)
        tl.store(out + 9 * N + rows, least, mask=inside)


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
    """[m] keys of the thresholds: the largest t such that the logits at or above it are enough, of all ranks'.

    Args:
        held: [m, whole tiles] this rank's logits.
        top: [m], M of all ranks.
        bracket: [2, m], of `listed`; it is left as it was.
        wanted: [m], Σ 2^((x−M)·f) that is enough; with `count`, a number of logits.
    """
    rows, ranks, sizes = f.shape[0], 0, blocks(work, LOOK)
    found, out = work.empty(0), work.empty(10, rows)
    after, spare = torch.empty_like(bracket), torch.empty_like(bracket)
    if not rows:
        return bracket[0]
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
        found = gather_stacked(out, group)
        ranks = found.shape[0]
    return bracket[0]


@triton.jit(do_not_specialize=["N", "V", "stride_ids", "stride_held", "stride_out"])
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
    threshold = float_of(tl.load(least_ptr + rows, mask=inside, other=0))
    f = tl.load(f_ptr + rows, mask=inside, other=0.0)
    M = tl.load(M_ptr + rows, mask=inside, other=0.0)
    count = tl.load(count_ptr + rows, mask=inside, other=0)
    source = (held, ids, V, stride_held, stride_ids)
    rest, largest, moment, squares, dropped, _, _ = add_up(
        source, rows, count, f, M, threshold, threshold, held, 0, False, False, WIDTH, ROWS, BLOCK
    )
    dropped = tl.maximum(dropped, tl.load(outside_ptr + rows, mask=inside, other=0.0))
    tl.store(threshold_ptr + rows, threshold, mask=inside)
    store_sums(out, rows, inside, stride_out, rest, largest, moment, squares, dropped)


def kept_sums(
    work: Any,
    held: Tensor,
    f: Tensor,
    tiles: Tiles,
    top: Tensor,
    least: Tensor,
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
            least,
            threshold,
            out,
            rows,
            work.head.valid,
            tiles.ids.stride(0),
            held.stride(0),
            out.stride(0),
            **sizes,
        )
