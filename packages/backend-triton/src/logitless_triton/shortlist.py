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

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless_triton.layout import SAMPLE, shortlist_length
from logitless_triton.listing import Listing, blocks, factors, float_of, key_of, load_bracket, program_rows
from logitless_triton.threshold import LANES, LOOK, add_up, load_sums, look, merged, narrowed, store_sums
from logitless_triton.tile import FLOOR

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
    rows, inside = program_rows(N, ROWS)
    count = tl.load(count_ptr + rows, mask=inside, other=0)
    low, high = load_bracket(bracket, rows, N, inside)
    sampled = count * WIDTH > tl.maximum(SAMPLE, LENGTH)  # fewer always have room
    if tl.max(sampled.to(tl.int32), 0) > 0:
        f, M = factors(f_ptr, M_ptr, rows, inside)
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


@triton.jit
def _lanes(placed_ptr, rows):
    """Where it stands how many logits each lane has put into the short list: [ROWS, LANES]."""
    return placed_ptr + rows.to(tl.int64)[:, None] * LANES + tl.arange(0, LANES)[None, :]


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
    rows, inside = program_rows(N, ROWS)
    f, M = factors(f_ptr, M_ptr, rows, inside)
    count = tl.load(count_ptr + rows, mask=inside, other=0)
    low, high = load_bracket(near, rows, N, inside)
    source = (held, ids, V, stride_held, stride_ids)
    in_short = count * WIDTH > SAMPLE
    count = tl.where(in_short, count, 0)
    sums, number, placed = add_up(
        source, rows, count, f, M, float_of(high), float_of(low), short, LENGTH, False, True, WIDTH, ROWS, BLOCK
    )
    above = number.to(tl.float32) if COUNT else sums[0] + sums[1]
    wanted = tl.load(wanted_ptr + rows, mask=inside, other=0.0)
    too_high = in_short & (above >= wanted)
    overflows = in_short & (tl.max(placed, 1) > LENGTH // LANES)
    if tl.max((too_high | overflows).to(tl.int32), 0) > 0:
        floor, ceiling = load_bracket(bracket, rows, N, inside)
        tl.debug_barrier()  # every thread has read what is written now
        tl.store(near + rows, tl.where(too_high, high, tl.where(overflows, floor, low)), mask=inside)
        tl.store(near + N + rows, tl.where(too_high, ceiling, high), mask=inside)
        in_short = in_short & (too_high == 0) & (overflows == 0)
    tl.store(_lanes(placed_ptr, rows), tl.where(in_short[:, None], placed, -1), mask=inside[:, None])
    tl.store(above_ptr + rows, above, mask=inside)
    store_sums(out, rows, inside, stride_out, sums)


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
    rows, inside = program_rows(N, ROWS)
    f, M = factors(f_ptr, M_ptr, rows, inside)
    wanted = tl.load(wanted_ptr + rows, mask=inside, other=0.0)
    count = tl.load(count_ptr + rows, mask=inside, other=0)
    low, high = load_bracket(near, rows, N, inside)
    zero = tl.full((ROWS,), 0.0, tl.float32)
    sums = (zero, zero, zero, zero, tl.load(outside_ptr + rows, mask=inside, other=0.0))
    if LENGTH > 0:
        PART: tl.constexpr = 4 * LANES
        floor = tl.load(bracket + rows, mask=inside, other=0)
        above = tl.load(above_ptr + rows, mask=inside, other=0.0)
        placed = tl.load(_lanes(placed_ptr, rows), mask=inside[:, None], other=-1)
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
        of_list, _, _ = add_up(
            listing, rows, places, f, M, threshold, threshold, short, 0, True, False, WIDTH, ROWS, PART
        )
        count = tl.where(in_short, 0, count)
        of_others = load_sums(out, rows, inside & in_short, stride_out)  # than are in the list
        rest, largest, moment, squares, below = merged(of_list, of_others)
        sums = (rest, largest, moment, squares, tl.maximum(sums[4], below))
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
    of_tiles, _, _ = add_up(source, rows, count, f, M, threshold, threshold, short, 0, False, False, WIDTH, ROWS, BLOCK)
    tl.store(least_ptr + rows, low, mask=inside)
    tl.store(threshold_ptr + rows, threshold, mask=inside)
    store_sums(out, rows, inside, stride_out, merged(sums, of_tiles))


def find(
    logits: Listing,
    bracket: Tensor,
    wanted: Tensor,
    threshold: Tensor,
    out: Tensor,
    *,
    count: bool,
    total: Tensor | None = None,
) -> Tensor:
    """Keys [m] of the thresholds, as `logitless_triton.rounds.search` has them; and what `kept_sums` finds.

    Args:
        bracket: [2, m], of `listed`, or from another threshold on.
        wanted: [m], Σ 2^((x−M)·f) that is enough; with `count`, a number of logits.
        threshold: [m], to be filled in.
        out: `SUMS` [5, m], to be filled in.
        total: [m] mass of all logits from another threshold on, where the bracket begins with it.
    """
    work, (rows, columns) = logits.work, logits.held.shape
    least, length, sizes = bracket.new_empty(rows), shortlist_length(columns), blocks(work)
    near, short, placed, above = bracket, work.empty(0), least, work.empty(0)
    if length:
        near, above = torch.empty_like(bracket), work.empty(rows)
        short, placed = work.empty(rows, length), work.empty(rows, LANES.value, dtype=torch.int32)
        lengths = {"LENGTH": length, "SAMPLE": SAMPLE, "COUNT": count}
        sample = {"WIDTH": sizes["WIDTH"], "ROWS": sizes["ROWS"], "NESTED": total is not None, "num_warps": 8}
        whole = logits.mass if total is None else total
        logits.launch(_sample_kernel, logits.f, logits.top, whole, wanted, bracket, near, **lengths, **sample)
        own = (logits.f, logits.top, wanted, bracket, near, short, placed, above, out)
        logits.launch(_split_kernel, *own, stride_out=out.stride(0), **lengths, **sizes)
    own = (logits.outside, logits.f, logits.top, wanted, bracket, near, short, placed, above, least, threshold, out)
    options = {"LENGTH": length, "COUNT": count, **blocks(work, LOOK)}
    options["maxnreg"] = 80  # six programs of a multiprocessor: on an H200 all rows of a chunk at once
    logits.launch(_find_kernel, *own, stride_out=out.stride(0), **options)
    return least
