"""What is found in logits that are held: masses above some levels, and sums over what is kept.

The threshold t of a kept set {x >= t} is searched for among the floats from a floor to M, in the order of their bits,
which holds ties exactly: a round finds the mass (or the number) of the logits at or above seven levels, and the largest
and the least logit between the ends: the interval then ends next to one of the levels or logits on either side.

On one rank `logitless_triton.shortlist` makes all rounds in one launch, whose levels lie where the masses at the ends
say that t is; `logitless_triton.rounds` makes each one of its own, by eighths.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

import triton
import triton.language as tl

from logitless_triton.listing import float_of, key_of, tile_logits
from logitless_triton.tile import FLOOR

__all__ = ["LANES", "LOOK", "SUMS", "add_up", "aim", "load_sums", "look", "merged", "narrowed", "only", "store_sums"]

LANES = tl.constexpr(128)  # threads of a program
LOOK = 1024  # logits of a row that are compared with the levels together: what fits the registers
SUMS = ("rest", "largest", "moment", "squares", "dropped")
"""Of a row: Σ 2^((x−M)·f) of x < M, how many x are M, T and Σ 2^(2(x−M)·f) of what is kept, and the largest
x that is not."""


@triton.jit
def aim(low, high, at_low, at_high, wanted, f, M, COUNT: tl.constexpr):
    """Between which parts of the values from low to high a round looks: the middle, and how far apart its levels are.

    Where the masses (COUNT: numbers) at low and at high say, as if they fell evenly in between; they are off by about
    the root of how many logits there are. Else sevenths.

    Args:
        at_low, at_high: masses [ROWS], NaN where they are not known.
    """
    there = at_low - at_high
    middle = (at_low - wanted) / there
    if not COUNT:
        there /= tl.exp2((float_of(low) * 0.5 + float_of(high) * 0.5 - M) * f)
    apart = 0.02 + 0.3 / tl.sqrt(there)
    known = (middle > 0.0) & (middle < 1.0) & (apart < 1.0 / 7.0)
    return tl.where(known, middle, 0.5), tl.where(known, apart, 1.0 / 7.0)


@triton.jit
def _key_at(low, high, way, middle, apart, VALUES: tl.constexpr):
    """The level of a way from 0, the low key, to 7: eighths; with VALUES six of the values, see `aim`, and the middle.

    Between a negative floor and a positive M most floats lie next to zero: there an eighth of the keys is little.
    """
    if VALUES:
        bottom = float_of(low)
        part = tl.minimum(tl.maximum(middle + (way.to(tl.float32) - 3.5) * apart, 0.0), 1.0)
        value = bottom + (float_of(high) - bottom) * part
        at = tl.minimum(tl.maximum(key_of(value), low), high - 1)  # also of infinities and NaN
        key = tl.where(way == 0, low, tl.where(way == 7, low + ((high - low) >> 1), at))
    else:
        key = low + (((high - low) * way) >> 3)
    return key


@triton.jit
def narrowed(low, high, mass, largest, least, wanted, middle, apart, VALUES: tl.constexpr):
    """The keys [ROWS] between which the threshold lies, by what was found at or above the levels, and between them.

    And the masses at them, the second one NaN where it is that of the high key from before.
    """
    ways = tl.arange(0, 8).to(tl.int64)[None, :]
    level = _key_at(low[:, None], high[:, None], ways, middle[:, None], apart[:, None], VALUES)
    enough = (mass >= wanted[:, None]) | (ways == 0)
    new_low = tl.max(tl.where(enough, level, low[:, None]), 1)
    new_high = tl.min(tl.where(enough, high[:, None], level), 1)
    at_low = tl.min(tl.where(enough, mass, float("inf")), 1)
    at_high = tl.max(tl.where(enough, -float("inf"), mass), 1)
    # No further than to a logit. Where masses are added up in another order than in the round before, so that all of
    # the interval now seems too little by a rounding, it is the least one.
    new_low = tl.maximum(new_low, tl.minimum(key_of(least), high - 1))
    new_high = tl.maximum(tl.minimum(new_high, key_of(largest) + 1), new_low + 1)
    is_open = high - low > 1  # else nothing was found, and what is read is not of this search
    at_high = tl.where(at_high == -float("inf"), float("nan"), at_high)
    return tl.where(is_open, new_low, low), tl.where(is_open, new_high, high), at_low, at_high


@triton.jit
def _logits(
    source, rows, step, count, SHORT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Logits [ROWS, BLOCK // LANES, LANES] of a step through the listed tiles or a short list; −inf after the last.

    A lane is what one thread has loaded. That is so where 4 warps load 16 bytes for each thread; the layout then
    changes nothing but names, and sums over the middle axis stay within a thread.

    Args:
        source: held logits, ids of tiles, and both strides; SHORT: where the lists are, their length, and the first
            place [ROWS] of each row.
        count: [ROWS], of tiles; SHORT: of a lane's places.
    """
    if SHORT:
        short, length, start = source
        offs = tl.arange(0, BLOCK)[None, :]
        first = (start + step * (BLOCK // LANES))[:, None] * LANES
        place = step * (BLOCK // LANES) + offs // LANES  # so that 16 bytes are seen to have one mask
        at = short + rows.to(tl.int64)[:, None] * length + first + offs
        x = tl.load(at, mask=place < count[:, None], other=-float("inf"))
        x = tl.reshape(x, (ROWS, BLOCK // (4 * LANES), 1, LANES, 4))
    else:
        held, ids, stride_held, stride_ids = source
        x, _, _ = tile_logits(held, ids, rows, step * (BLOCK // WIDTH), count, stride_held, stride_ids, WIDTH, BLOCK)
        x = tl.reshape(x, (ROWS, BLOCK // (4 * LANES), 4 * LANES // WIDTH, WIDTH // 4, 4))
    return tl.reshape(tl.permute(x, (0, 1, 4, 2, 3)), (ROWS, BLOCK // LANES, LANES))


@triton.jit
def _steps(count, SHORT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """How many it takes to go through."""
    EACH: tl.constexpr = BLOCK // (LANES if SHORT else WIDTH)
    return (tl.max(count, 0) + (EACH - 1)) // EACH


@triton.jit
def look(
    source,
    rows,
    count,
    f,
    M,
    low,
    high,
    middle,
    apart,
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
        key = _key_at(low, high, tl.full((ROWS,), way, tl.int64), middle, apart, VALUES)
        lines += (float_of(key)[:, None, None],)
    mass = tl.full((ROWS, 8, LANES), 0.0, tl.float32)
    largest = tl.full((ROWS, LANES), -float("inf"), tl.float32)
    least = tl.full((ROWS, LANES), float("inf"), tl.float32)
    ahead = _logits(source, rows, 0, count, SHORT, WIDTH, ROWS, BLOCK)
    for step in range(0, _steps(count, SHORT, WIDTH, BLOCK)):
        x = ahead  # what comes next is asked for before this is looked at
        ahead = _logits(source, rows, step + 1, count, SHORT, WIDTH, ROWS, BLOCK)
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
    SUMMED: tl.constexpr,
    COUNT: tl.constexpr,
    LIST: tl.constexpr,
    SHORT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`SUMS` [ROWS] of x >= threshold, the last one of x < `bottom`; how many x are >= threshold; what is listed.

    Args:
        short: pointers [ROWS]; LIST: the logits from `bottom` on and below the threshold are put there. Each lane has
            places of its own, so that threads need not wait for one another: those it would need [ROWS, LANES].
        length: [ROWS], places of a lane.
        SUMMED: how many of the first four sums are asked for, the last one too where it is more than two; that is not
            had where tiles are listed. LIST and COUNT: the number is. What there is not is 0, and −inf.
    """
    # Where M is infinite, infinity − infinity must not reach the sums: of such a row only numbers are known.
    is_finite = float("inf") > M
    scale, top = tl.where(is_finite, f, -1.0)[:, None, None], tl.where(is_finite, M, -float("inf"))[:, None, None]
    line, edge = threshold[:, None, None], bottom[:, None, None]
    most = tl.where(threshold <= M, M, float("nan"))[:, None, None]  # LIST: the threshold may be above M
    rest = tl.full((ROWS, LANES), 0.0, tl.float32)
    largest = tl.full((ROWS, LANES), 0.0, tl.float32)
    moment = tl.full((ROWS, LANES), 0.0, tl.float32)
    squares = tl.full((ROWS, LANES), 0.0, tl.float32)
    dropped = tl.full((ROWS, LANES), -float("inf"), tl.float32)
    number = tl.full((ROWS, LANES), 0, tl.int32)
    before = tl.arange(0, LANES)[None, :] - LANES  # a lane's first place
    next_place = tl.broadcast_to(before, (ROWS, LANES))
    end = length[:, None, None] * LANES
    ahead = _logits(source, rows, 0, count, SHORT, WIDTH, ROWS, BLOCK)
    for step in range(0, _steps(count, SHORT, WIDTH, BLOCK)):
        x = ahead  # what comes next is asked for before this is looked at
        ahead = _logits(source, rows, step + 1, count, SHORT, WIDTH, ROWS, BLOCK)
        kept = (x < line) == 0  # NaN is, and seen
        if SUMMED > 0:
            d = tl.maximum((x - top) * scale, FLOOR, propagate_nan=tl.PropagateNan.ALL)
            is_most = tl.where(x == most, 1.0, 0.0)
            e = tl.where(kept, tl.exp2(d), 0.0) - is_most  # of M itself exactly 0
            rest += tl.sum(e, 1)
            largest += tl.sum(is_most, 1)
            if SUMMED > 2:
                moment += tl.sum(e * d, 1)
            if SUMMED > 3:
                squares += tl.sum(e * e, 1)
        if LIST and COUNT:
            number += tl.sum(tl.where(x >= line, 1, 0), 1)
        if SUMMED > 2 and (SHORT or not LIST):
            dropped = tl.maximum(dropped, tl.max(tl.where(x < edge, x, -float("inf")), 1))
        if LIST:
            # Nothing of a row that has ended where others have not: that is −inf, and so may be the edge.
            is_there = step * (BLOCK // (LANES if SHORT else WIDTH)) < count
            chosen = (x >= tl.where(is_there, bottom, float("inf"))[:, None, None]) & (x < line)
            place = next_place[:, None, :] + tl.cumsum(tl.where(chosen, LANES, 0), 1)
            # With one axis only, all compilers agree on which thread has what: nothing is moved.
            at = tl.reshape(short[:, None, None] + place, (ROWS * BLOCK,))
            room = tl.reshape(chosen & (place < end), (ROWS * BLOCK,))
            tl.store(at, tl.reshape(x, (ROWS * BLOCK,)), mask=room)
            next_place += tl.sum(tl.where(chosen, LANES, 0), 1)
    of_max = tl.sum(largest, 1)
    of_rest = tl.sum(rest, 1) + tl.where(is_finite, 0.0, of_max)  # 2^FLOOR was taken for them, less 1
    sums = (of_rest, of_max, tl.sum(moment, 1), tl.sum(squares, 1) + of_max, tl.max(dropped, 1))
    return sums, tl.sum(number, 1), (next_place - before) // LANES


@triton.jit
def merged(a, b):
    """`SUMS` of what two `SUMS` are of."""
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], tl.maximum(a[4], b[4])


@triton.jit
def only(sums, chosen):
    """`SUMS` of the rows that are chosen [ROWS], and of nothing elsewhere."""
    rest, largest = tl.where(chosen, sums[0], 0.0), tl.where(chosen, sums[1], 0.0)
    moment, squares = tl.where(chosen, sums[2], 0.0), tl.where(chosen, sums[3], 0.0)
    return rest, largest, moment, squares, tl.where(chosen, sums[4], -float("inf"))


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
