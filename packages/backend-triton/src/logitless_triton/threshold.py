"""What is found in logits that are held: masses above some levels, and sums over what is kept.

The threshold t of a kept set {x >= t} is searched for among the floats from a floor to M, in the order of their bits,
which holds ties exactly: a round finds the mass (or the number) of the logits at or above seven levels, and with it an
eighth of the interval; the largest and the least logit within say when only one is left.

On one rank `logitless_triton.shortlist` makes all rounds in one launch; `logitless_triton.rounds` makes each one of
its own, by other levels.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

import triton
import triton.language as tl

from logitless_triton.listing import float_of, key_of, tile_logits
from logitless_triton.tile import FLOOR

__all__ = ["LANES", "LOOK", "SUMS", "add_up", "load_sums", "look", "merged", "narrowed", "store_sums"]

LANES = tl.constexpr(128)  # threads of a program
LOOK = 1024  # logits of a row that are compared with the levels together: what fits the registers
SUMS = ("rest", "largest", "moment", "squares", "dropped")
"""Of a row: Σ 2^((x−M)·f) of x < M, how many x are M, T and Σ 2^(2(x−M)·f) of what is kept, and the largest
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
    sums = (tl.sum(rest, 1), tl.sum(largest, 1), tl.sum(moment, 1), tl.sum(squares, 1), tl.max(dropped, 1))
    return sums, tl.sum(number, 1), placed


@triton.jit
def merged(a, b):
    """`SUMS` of what two `SUMS` are of."""
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], tl.maximum(a[4], b[4])


@triton.jit
def load_sums(out, rows, inside, stride_out):
    """What `store_sums` has put there."""
    rest = tl.load(out + rows, mask=inside, other=0.0)
    largest = tl.load(out + stride_out + rows, mask=inside, other=0.0)
    moment = tl.load(out + 2 * stride_out + rows, mask=inside, other=0.0)
    squares = tl.load(out + 3 * stride_out + rows, mask=inside, other=0.0)
    dropped = tl.load(out + 4 * stride_out + rows, mask=inside, other=-float("inf"))
    return rest, largest, moment, squares, dropped


@triton.jit
def store_sums(out, rows, inside, stride_out, sums):
    """Put [ROWS] of each of `SUMS` into its row."""
    for row in tl.static_range(5):
        tl.store(out + row * stride_out + rows, sums[row], mask=inside)
