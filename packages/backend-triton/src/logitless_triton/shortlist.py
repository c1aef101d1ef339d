"""The least logit that a token keeps, and sums over the kept ones, on one rank: three launches, about one pass.

Where a row's listed tiles hold more than `SAMPLE` logits, these are read once: what surely is kept is added up, and
what may or may not be is put into a short list, in which the rounds of `logitless_triton.threshold` then search. Where
the short list might have no room for all that the floor lets through, a sample of the listed logits is searched first,
for keys between which the threshold lies but for bad luck:

    number   n̂(t) = c·#{sampled x >= t}, of k                              c: listed logits for each sampled one
    mass     what is not kept, of which each term is less than 2^((t−M)·f): m̂(t) = m − c·Σ{sampled x < t} 2^((x−M)·f)

each give or take 4 standard deviations, √(c·q·what is estimated) at most, and 8·c·q, where q is the largest term:
a few large terms that the sample has missed. Bad luck is noticed, as is a short list that overflows; the rounds then go
through all listed tiles, as they do where those are few.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless_triton.candidates import Tiles, blocks, float_of, key_of
from logitless_triton.layout import SAMPLE, shortlist_length
from logitless_triton.threshold import LANES, LOOK, add_up, look, narrowed, store_sums
from logitless_triton.tile import FLOOR, ceil_div

__all__ = ["find"]

STEPS = tl.constexpr(24)  # through the sample, half of them halving what is left of the values, half of the keys


@triton.jit
def _edge(x, weight, f, M, low, high, each, total, wanted, sign, COUNT: tl.constexpr):
    """Keys [ROWS] side by side: at the first there is enough in the sample, give (sign 1) or take (−1) doubt."""
    for step in range(STEPS):
        value = key_of(float_of(low) * 0.5 + float_of(high) * 0.5)
        value = tl.minimum(tl.maximum(value, low), high - 1)  # also of infinities and NaN
        middle = tl.where(step % 2 == 0, value, low + ((high - low) >> 1))
        level = float_of(middle)
        above = x >= level[:, None]
        if COUNT:
            estimate = each * tl.sum(tl.where(above, weight, 0.0), 1)
            unit = each
            found = estimate
        else:
            estimate = each * tl.sum(tl.where(above, 0.0, weight), 1)
            unit = each * tl.exp2((level - M) * f)
            found = total - estimate
        doubt = 4.0 * tl.sqrt(unit * estimate) + 8.0 * unit
        enough = found + sign * doubt >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low, high


@triton.jit(do_not_specialize=["N", "V", "stride_ids", "stride_held"])
def _sample_kernel(
    held,
    ids,
    count_ptr,
    f_ptr,
    M_ptr,
    total_ptr,
    wanted_ptr,
    bracket,
    near,
    N,
    V,
    stride_ids,
    stride_held,
    LENGTH: tl.constexpr,
    SAMPLE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COUNT: tl.constexpr,
    NESTED: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    count = tl.load(count_ptr + rows, mask=inside, other=0)
    low = tl.load(bracket + rows, mask=inside, other=0)
    high = tl.load(bracket + N + rows, mask=inside, other=0)
    sampled = count * WIDTH > tl.maximum(SAMPLE, LENGTH)  # fewer always have room
    if tl.max(sampled.to(tl.int32), 0) > 0:
        f = tl.load(f_ptr + rows, mask=inside, other=0.0)
        M = tl.load(M_ptr + rows, mask=inside, other=0.0)
        total = tl.load(total_ptr + rows, mask=inside, other=0.0)
        wanted = tl.load(wanted_ptr + rows, mask=inside, other=0.0)
        at = rows.to(tl.int64)[:, None]
        offs = tl.arange(0, SAMPLE)[None, :]
        place = offs // 4 * count[:, None] // (SAMPLE // 4)  # four logits each of many tiles
        is_listed = place < count[:, None]
        tile = tl.load(ids + at * stride_ids + place, mask=is_listed, other=0)
        cols = tile * WIDTH + offs // 4 * 5 % (WIDTH // 4) * 4 + offs % 4  # 5: each four elsewhere in its tile
        x = tl.load(held + at * (stride_held // WIDTH * WIDTH) + cols, mask=is_listed, other=-float("inf"))
        real = is_listed & (cols < V)
        if COUNT:
            weight = real.to(tl.float32)
        else:
            if NESTED:  # what is below is not part of the total
                real = real & (x >= float_of(low)[:, None])
            weight = tl.where(real, tl.exp2(tl.maximum((x - M[:, None]) * f[:, None], FLOOR)), 0.0)
        each = count.to(tl.float32) * (WIDTH / SAMPLE)
        surely, _ = _edge(x, weight, f, M, low, high, each, total, wanted, -1.0, COUNT)
        _, surely_not = _edge(x, weight, f, M, low, high, each, total, wanted, 1.0, COUNT)
        low = tl.where(sampled, surely, low)
        high = tl.where(sampled, surely_not, high)
    tl.store(near + rows, low, mask=inside)
    tl.store(near + N + rows, high, mask=inside)


@triton.jit(do_not_specialize=["N", "V", "stride_ids", "stride_held", "stride_out"])
def _split_kernel(
    held,
    ids,
    count_ptr,
    f_ptr,
    M_ptr,
    wanted_ptr,
    bracket,
    near,
    short,
    placed_ptr,
    above_ptr,
    out,
    N,
    V,
    stride_ids,
    stride_held,
    stride_out,
    LENGTH: tl.constexpr,
    SAMPLE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    f = tl.load(f_ptr + rows, mask=inside, other=0.0)
    M = tl.load(M_ptr + rows, mask=inside, other=0.0)
    count = tl.load(count_ptr + rows, mask=inside, other=0)
    low = tl.load(near + rows, mask=inside, other=0)
    high = tl.load(near + N + rows, mask=inside, other=0)
    source = (held, ids, V, stride_held, stride_ids)
    in_short = count * WIDTH > SAMPLE
    count = tl.where(in_short, count, 0)
    rest, largest, moment, squares, dropped, number, placed = add_up(
        source, rows, count, f, M, float_of(high), float_of(low), short, LENGTH, False, True, WIDTH, ROWS, BLOCK
    )
    above = number.to(tl.float32) if COUNT else rest + largest
    wanted = tl.load(wanted_ptr + rows, mask=inside, other=0.0)
    too_high = in_short & (above >= wanted)
    overflows = in_short & (tl.max(placed, 1) > LENGTH // LANES)
    if tl.max((too_high | overflows).to(tl.int32), 0) > 0:
        floor = tl.load(bracket + rows, mask=inside, other=0)
        ceiling = tl.load(bracket + N + rows, mask=inside, other=0)
        tl.debug_barrier()  # every thread has read what is written now
        tl.store(near + rows, tl.where(too_high, high, tl.where(overflows, floor, low)), mask=inside)
        tl.store(near + N + rows, tl.where(too_high, ceiling, high), mask=inside)
        in_short = in_short & (too_high == 0) & (overflows == 0)
    at = placed_ptr + rows.to(tl.int64)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    tl.store(at, tl.where(in_short[:, None], placed, -1), mask=inside[:, None])
    tl.store(above_ptr + rows, above, mask=inside)
    store_sums(out, rows, inside, stride_out, rest, largest, moment, squares, dropped)


@triton.jit(do_not_specialize=["N", "V", "stride_ids", "stride_held", "stride_out"])
def _find_kernel(
    held,
    ids,
    count_ptr,
    outside_ptr,
    f_ptr,
    M_ptr,
    wanted_ptr,
    bracket,
    near,
    short,
    placed_ptr,
    above_ptr,
    least_ptr,
    threshold_ptr,
    out,
    N,
    V,
    stride_ids,
    stride_held,
    stride_out,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    f = tl.load(f_ptr + rows, mask=inside, other=0.0)
    M = tl.load(M_ptr + rows, mask=inside, other=0.0)
    wanted = tl.load(wanted_ptr + rows, mask=inside, other=0.0)
    count = tl.load(count_ptr + rows, mask=inside, other=0)
    low = tl.load(near + rows, mask=inside, other=0)
    high = tl.load(near + N + rows, mask=inside, other=0)
    rest = tl.full((ROWS,), 0.0, tl.float32)
    largest = tl.full((ROWS,), 0.0, tl.float32)
    moment = tl.full((ROWS,), 0.0, tl.float32)
    squares = tl.full((ROWS,), 0.0, tl.float32)
    dropped = tl.load(outside_ptr + rows, mask=inside, other=0.0)
    if LENGTH > 0:
        PART: tl.constexpr = 4 * LANES
        floor = tl.load(bracket + rows, mask=inside, other=0)
        above = tl.load(above_ptr + rows, mask=inside, other=0.0)
        at = placed_ptr + rows.to(tl.int64)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        placed = tl.load(at, mask=inside[:, None], other=-1)
        most = tl.max(placed, 1)
        in_short = most >= 0
        listing = (short, LENGTH, placed)
        doubted = in_short & (low > floor)
        pending = in_short & (doubted | (high - low > 1))
        while tl.max(pending.to(tl.int32), 0) > 0:
            places = tl.where(pending, most, 0)
            mass, largest_in, least_in = look(
                listing, rows, places, f, M, low, high, True, True, WIDTH, ROWS, PART, COUNT
            )
            mass += above[:, None]
            of_low = tl.max(tl.where(tl.arange(0, 8)[None, :] == 0, mass, 0.0), 1)
            too_low = doubted & (of_low < wanted)
            new_low, new_high = narrowed(low, high, mass, largest_in, least_in, wanted, True)
            high = tl.where(too_low, low, tl.where(pending, new_high, high))
            low = tl.where(too_low, floor, tl.where(pending, new_low, low))
            in_short = in_short & (too_low == 0)
            doubted = doubted & (pending == 0)
            pending = in_short & (high - low > 1)
        threshold = float_of(low)
        places = tl.where(in_short, most, 0)
        rest, largest, moment, squares, below, _, _ = add_up(
            listing, rows, places, f, M, threshold, threshold, short, 0, True, False, WIDTH, ROWS, PART
        )
        count = tl.where(in_short, 0, count)
        is_split = inside & in_short
        rest += tl.load(out + rows, mask=is_split, other=0.0)
        largest += tl.load(out + stride_out + rows, mask=is_split, other=0.0)
        moment += tl.load(out + 2 * stride_out + rows, mask=is_split, other=0.0)
        squares += tl.load(out + 3 * stride_out + rows, mask=is_split, other=0.0)
        below = tl.maximum(below, tl.load(out + 4 * stride_out + rows, mask=is_split, other=-float("inf")))
        dropped = tl.maximum(dropped, below)
    source = (held, ids, V, stride_held, stride_ids)
    pending = (count > 0) & (high - low > 1)
    while tl.max(pending.to(tl.int32), 0) > 0:
        so_many = tl.where(pending, count, 0)
        mass, largest_in, least_in = look(
            source, rows, so_many, f, M, low, high, False, True, WIDTH, ROWS, BLOCK, COUNT
        )
        new_low, new_high = narrowed(low, high, mass, largest_in, least_in, wanted, True)
        low = tl.where(pending, new_low, low)
        high = tl.where(pending, new_high, high)
        pending = (count > 0) & (high - low > 1)
    threshold = float_of(low)
    more_rest, more_largest, more_moment, more_squares, below, _, _ = add_up(
        source, rows, count, f, M, threshold, threshold, short, 0, False, False, WIDTH, ROWS, BLOCK
    )
    tl.store(least_ptr + rows, low, mask=inside)
    tl.store(threshold_ptr + rows, threshold, mask=inside)
    store_sums(
        out,
        rows,
        inside,
        stride_out,
        rest + more_rest,
        largest + more_largest,
        moment + more_moment,
        squares + more_squares,
        tl.maximum(dropped, below),
    )


def find(
    work: Any,
    held: Tensor,
    f: Tensor,
    tiles: Tiles,
    top: Tensor,
    bracket: Tensor,
    wanted: Tensor,
    threshold: Tensor,
    out: Tensor,
    *,
    count: bool,
    total: Tensor | None = None,
) -> Tensor:
    """Keys [m] of the thresholds, as `logitless_triton.threshold.search` has them; and what `kept_sums` finds.

    Args:
        held: [m, whole tiles] logits.
        top: [m], M.
        bracket: [2, m], of `listed`, or from another threshold on.
        wanted: [m], Σ 2^((x−M)·f) that is enough; with `count`, a number of logits.
        threshold: [m], to be filled in.
        out: `SUMS` [5, m], to be filled in.
        total: [m] mass of all logits from another threshold on, where the bracket begins with it.
    """
    rows, length = f.shape[0], shortlist_length(held.shape[1])
    least = bracket.new_empty(rows)
    if not rows:
        return least
    near, short, placed, above = bracket, work.empty(0), least, work.empty(0)
    sizes = blocks(work)
    grid = (ceil_div(rows, sizes["ROWS"]),)
    listed = (held, tiles.ids, tiles.count)
    numbers = (rows, work.head.valid, tiles.ids.stride(0), held.stride(0))
    if length:
        near, above = torch.empty_like(bracket), work.empty(rows)
        short, placed = work.empty(rows, length), work.empty(rows, LANES.value, dtype=torch.int32)
        lengths = {"LENGTH": length, "SAMPLE": SAMPLE, "COUNT": count}
        sample = {"WIDTH": sizes["WIDTH"], "ROWS": sizes["ROWS"], "NESTED": total is not None, "num_warps": 8}
        whole = tiles.mass if total is None else total
        _sample_kernel[grid](*listed, f, top, whole, wanted, bracket, near, *numbers, **lengths, **sample)
        found = (near, short, placed, above, out)
        _split_kernel[grid](*listed, f, top, wanted, bracket, *found, *numbers, out.stride(0), **lengths, **sizes)
    _find_kernel[grid](
        *listed,
        tiles.outside,
        f,
        top,
        wanted,
        bracket,
        near,
        short,
        placed,
        above,
        least,
        threshold,
        out,
        *numbers,
        out.stride(0),
        LENGTH=length,
        COUNT=count,
        **blocks(work, LOOK),
        maxnreg=80,  # six programs of a multiprocessor: on an H200 all rows of a chunk at once
    )
    return least
