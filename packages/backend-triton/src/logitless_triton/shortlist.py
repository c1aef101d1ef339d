"""The least logit that a token keeps, and sums over the kept ones, on one rank: three launches, about one pass.

Where a row's listed tiles hold more than `SAMPLE` logits, these are read once: what surely is kept is added up, and
what may or may not be is put into a short list, in which the rounds of `logitless_triton.threshold` then search. Where
the short list might have no room for all that the floor lets through, a sample of the listed logits is searched first,
for keys between which the threshold lies but for bad luck:

    number   n̂(t) = c·#{sampled x >= t}, of k                              c: listed logits for each sampled one
    mass     what is not kept, of which each term is less than 2^((t−M)·f): m̂(t) = m − c·Σ{sampled x < t} 2^((x−M)·f)

each give or take 4 standard deviations, as the sums of `EACH` logits side by side tell them, which may be alike, and
8·c·q, where q is the largest term: a few large terms that the sample has missed. Bad luck is noticed, as is a short
list that overflows; the rounds then go through all listed tiles, as they do where those are few.

A round leaves little of a short list: where that was long, it is put behind it, what surely is kept is added to the
sums, and the next rounds read no more than that. The largest logit that is not kept is seldom anywhere but in the short
list; the tiles are read for it only where the list has none.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless_triton.layout import SAMPLE, STEP, shortlist_length
from logitless_triton.listing import RESIDENT, Listing, blocks, factors, float_of, key_of, load_bracket, program_rows
from logitless_triton.threshold import LANES, LOOK, add_up, aim, load_sums, look, merged, narrowed, only, store_sums
from logitless_triton.tile import FLOOR

__all__ = ["find"]

STEPS = tl.constexpr(24)  # through the sample, at most: half of them halve what is left of the values, half of the keys
EACH = tl.constexpr(8)  # sampled logits side by side: the 32 bytes that a multiprocessor reads at least
NEAR = tl.constexpr(8.0)  # sampled logits between two keys that are near enough: few beside the doubt


@triton.jit
def _edge(x, weight, f, M, low, high, each, total, wanted, sign, sampled, COUNT: tl.constexpr):
    """Keys [ROWS] side by side: at the first there is enough in the sample, give (sign 1) or take (−1) doubt.

    Side by side but for `NEAR`; of the rows that are not `sampled`, what they were.

    Args:
        x, weight: [ROWS, groups, EACH].
    """
    GROUPS: tl.constexpr = x.shape[1]
    at_low = tl.full(low.shape, float("inf"), tl.float32)
    at_high = -at_low
    step, pending = 0, sampled
    while tl.max(pending.to(tl.int32), 0) > 0:
        value = key_of(float_of(low) * 0.5 + float_of(high) * 0.5)
        value = tl.minimum(tl.maximum(value, low), high - 1)  # also of infinities and NaN
        middle = tl.where(step % 2 == 0, value, low + ((high - low) >> 1))
        level = float_of(middle)
        above = x >= level[:, None, None]
        if COUNT:
            unit = each
            groups = tl.sum(tl.where(above, weight, 0.0), 2)
        else:
            unit = each * tl.exp2((level - M) * f)
            groups = tl.sum(tl.where(above, 0.0, weight), 2)
        summed = tl.sum(groups, 1)
        variance = tl.sum(groups * groups, 1) - summed * summed / GROUPS
        found = each * summed if COUNT else total - each * summed
        found += sign * (4.0 * each * tl.sqrt(tl.maximum(variance, 0.0)) + 8.0 * unit)
        enough = found >= wanted
        low = tl.where(pending & enough, middle, low)
        high = tl.where(pending & (enough == 0), middle, high)
        at_low = tl.where(enough, found, at_low)
        at_high = tl.where(enough, at_high, found)
        step += 1
        pending = pending & ((at_low - at_high <= NEAR * unit) == 0) & (step < STEPS)
    return low, high


@triton.jit(do_not_specialize=["N", "stride_ids", "stride_held"])
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
        group = tl.arange(0, SAMPLE // EACH)[None, :]
        place = group * count[:, None] // (SAMPLE // EACH)  # of many tiles one or a few
        is_listed = place < count[:, None]
        tile = tl.load(ids + at * stride_ids + place, mask=is_listed, other=0)
        first = at * (stride_held // WIDTH * WIDTH) + tile * WIDTH + group * 5 % (WIDTH // EACH) * EACH  # 5: elsewhere
        real = tl.broadcast_to(is_listed[:, :, None], (ROWS, SAMPLE // EACH, EACH))
        x = tl.load(held + first[:, :, None] + tl.arange(0, EACH)[None, None, :], mask=real, other=-float("inf"))
        if COUNT:
            weight = real.to(tl.float32)
        else:
            if NESTED:  # what is below is not part of the total
                real = real & (x >= float_of(low)[:, None, None])
            d = tl.maximum((x - M[:, None, None]) * f[:, None, None], FLOOR)
            weight = tl.where(real, tl.exp2(d), 0.0)
        each = count.to(tl.float32) * (WIDTH / SAMPLE)
        low, _ = _edge(x, weight, f, M, low, high, each, total, wanted, -1.0, sampled, COUNT)
        _, high = _edge(x, weight, f, M, low, high, each, total, wanted, 1.0, sampled, COUNT)
    tl.store(near + rows, low, mask=inside)
    tl.store(near + N + rows, high, mask=inside)


@triton.jit
def _levelled(target, used, room, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """How many places [ROWS] of each lane a short list then fills, what it lacks with −inf; up to whole blocks.

    Args:
        target, used, room: where each row's list is, and of its lanes how many places were needed, and are there.
    """
    EACH: tl.constexpr = BLOCK // LANES
    most = tl.minimum((tl.max(used, 1) + (EACH - 1)) // EACH * EACH, room)
    offs = tl.arange(0, ROWS * LANES)  # one axis: see `add_up`
    used = tl.reshape(used, (ROWS * LANES,))
    last = tl.reshape(tl.broadcast_to(most[:, None], (ROWS, LANES)), (ROWS * LANES,))
    at = tl.reshape(tl.broadcast_to(target[:, None], (ROWS, LANES)), (ROWS * LANES,)) + offs % LANES
    for place in range(tl.min(used, 0), tl.max(most, 0)):
        tl.store(at + place * LANES, -float("inf"), mask=(place >= used) & (place < last))
    return most


@triton.jit(do_not_specialize=["N", "stride_ids", "stride_held", "stride_out"])
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
    size_ptr,
    above_ptr,
    out,
    N,
    stride_ids,
    stride_held,
    stride_out,
    LENGTH: tl.constexpr,
    SAMPLE: tl.constexpr,
    SUMMED: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    rows, inside = program_rows(N, ROWS)
    f, M = factors(f_ptr, M_ptr, rows, inside)
    count = tl.load(count_ptr + rows, mask=inside, other=0)
    low, high = load_bracket(near, rows, N, inside)
    source = (held, ids, stride_held, stride_ids)
    in_short = count * WIDTH > SAMPLE
    count = tl.where(in_short, count, 0)
    target, room = short + rows.to(tl.int64) * LENGTH, tl.full((ROWS,), LENGTH // LANES, tl.int32)
    line, edge = float_of(high), float_of(low)
    sums, number, used = add_up(
        source, rows, count, f, M, line, edge, target, room, SUMMED, COUNT, True, False, WIDTH, ROWS, BLOCK
    )
    above = number.to(tl.float32) if COUNT else sums[0] + sums[1]
    wanted = tl.load(wanted_ptr + rows, mask=inside, other=0.0)
    too_high = in_short & (above >= wanted)
    overflows = in_short & (tl.max(used, 1) > room)
    if tl.max((too_high | overflows).to(tl.int32), 0) > 0:
        floor, ceiling = load_bracket(bracket, rows, N, inside)
        tl.debug_barrier()  # every thread has read what is written now
        tl.store(near + rows, tl.where(too_high, high, tl.where(overflows, floor, low)), mask=inside)
        tl.store(near + N + rows, tl.where(too_high, ceiling, high), mask=inside)
        in_short = in_short & (too_high == 0) & (overflows == 0)
    size = _levelled(target, used, room, ROWS, PART)
    listed = tl.sum(used, 1).to(tl.float32)  # as if all were in the middle
    if not COUNT:
        listed *= tl.exp2((line * 0.5 + edge * 0.5 - M) * f)
    tl.store(above_ptr + N + rows, above + listed, mask=inside)
    tl.store(size_ptr + rows, tl.where(in_short, size, -1), mask=inside)
    tl.store(above_ptr + rows, above, mask=inside)
    store_sums(out, rows, inside, stride_out, sums)


@triton.jit
def _nearer(low, high, mass, largest, least, wanted, middle, apart, before_low, before_high):
    """`narrowed`, and masses for `aim`, where the last ones have served: else it is sevenths that come next."""
    low, high, at_low, at_high = narrowed(low, high, mass, largest, least, wanted, middle, apart, True)
    at_high = tl.where(at_high == at_high, at_high, before_high)
    missed = (at_low - at_high) * 4.0 > before_low - before_high
    return low, high, tl.where(missed, float("nan"), at_low), at_high


@triton.jit(do_not_specialize=["N", "stride_ids", "stride_held", "stride_out"])
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
    size_ptr,
    above_ptr,
    least_ptr,
    threshold_ptr,
    out,
    N,
    stride_ids,
    stride_held,
    stride_out,
    LENGTH: tl.constexpr,
    SUMMED: tl.constexpr,
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
    source = (held, ids, stride_held, stride_ids)
    zero = tl.full((ROWS,), 0.0, tl.float32)
    sums = (zero, zero, zero, zero, tl.full((ROWS,), -float("inf"), tl.float32))
    in_short = rows < 0
    if LENGTH > 0:
        floor = tl.load(bracket + rows, mask=inside, other=0)
        above = tl.load(above_ptr + rows, mask=inside, other=0.0)
        at_low, at_high = tl.load(above_ptr + N + rows, mask=inside, other=0.0), above
        size = tl.load(size_ptr + rows, mask=inside, other=-1)
        start = tl.full((ROWS,), 0, tl.int32)
        in_short = size >= 0
        doubted = in_short & (low > floor)
        pending = in_short & (doubted | (high - low > 1))
        while tl.max(pending.to(tl.int32), 0) > 0:
            listing = (short, LENGTH, start)
            here = tl.where(pending, size, 0)
            middle, apart = aim(low, high, at_low, at_high, wanted, f, M, COUNT)
            mass, largest_in, least_in = look(
                listing, rows, here, f, M, low, high, middle, apart, True, True, WIDTH, ROWS, BLOCK, COUNT
            )
            mass += above[:, None]
            of_low = tl.max(tl.where(tl.arange(0, 8)[None, :] == 0, mass, 0.0), 1)
            too_low = doubted & (of_low < wanted)
            new_low, new_high, at_low, at_high = _nearer(
                low, high, mass, largest_in, least_in, wanted, middle, apart, at_low, at_high
            )
            high = tl.where(too_low, low, tl.where(pending, new_high, high))
            low = tl.where(too_low, floor, tl.where(pending, new_low, low))
            in_short = in_short & (too_low == 0)
            doubted = doubted & (pending == 0)
            pending = in_short & (high - low > 1)
            longer = pending & (size > BLOCK // LANES)
            if tl.max(longer.to(tl.int32), 0) > 0:  # what may still be the threshold is put behind it
                here, room = tl.where(longer, size, 0), tl.full((ROWS,), LENGTH // LANES, tl.int32) - start - size
                target = short + (rows.to(tl.int64) * LENGTH + (start + size) * LANES)
                line, edge = float_of(high), float_of(low)
                more, number, used = add_up(
                    listing, rows, here, f, M, line, edge, target, room, SUMMED, COUNT, True, True, WIDTH, ROWS, BLOCK
                )
                fits = longer & (tl.max(used, 1) <= room)
                left = _levelled(target, used, tl.where(fits, room, 0), ROWS, BLOCK)
                tl.debug_barrier()  # what other threads have put there is read next
                sums = merged(sums, only(more, fits))
                above += tl.where(fits, number.to(tl.float32) if COUNT else more[0] + more[1], 0.0)
                start = tl.where(fits, start + size, start)
                size = tl.where(fits, left, size)
        listing, here, threshold = (short, LENGTH, start), tl.where(in_short, size, 0), float_of(low)
        more, _, _ = add_up(
            listing, rows, here, f, M, threshold, threshold, rows, rows, SUMMED, False, False, True, WIDTH, ROWS, BLOCK
        )
        sums = merged(merged(sums, more), load_sums(out, rows, inside & in_short, stride_out))
    so_many = tl.where(in_short, 0, count)
    pending = (so_many > 0) & (high - low > 1)
    at_low = tl.full((ROWS,), float("nan"), tl.float32)
    at_high = at_low
    while tl.max(pending.to(tl.int32), 0) > 0:
        here = tl.where(pending, so_many, 0)
        middle, apart = aim(low, high, at_low, at_high, wanted, f, M, COUNT)
        mass, largest_in, least_in = look(
            source, rows, here, f, M, low, high, middle, apart, False, True, WIDTH, ROWS, BLOCK, COUNT
        )
        new_low, new_high, at_low, at_high = _nearer(
            low, high, mass, largest_in, least_in, wanted, middle, apart, at_low, at_high
        )
        low = tl.where(pending, new_low, low)
        high = tl.where(pending, new_high, high)
        pending = (so_many > 0) & (high - low > 1)
    threshold = float_of(low)
    tl.store(least_ptr + rows, low, mask=inside)
    tl.store(threshold_ptr + rows, threshold, mask=inside)
    if SUMMED > 0:
        if SUMMED > 2:  # where the threshold is the least of a short list, the next logit is elsewhere
            so_many = tl.where(in_short & (sums[4] > -float("inf")), 0, count)
        more, _, _ = add_up(
            source,
            rows,
            so_many,
            f,
            M,
            threshold,
            threshold,
            rows,
            rows,
            SUMMED,
            False,
            False,
            False,
            WIDTH,
            ROWS,
            BLOCK,
        )
        below = tl.maximum(tl.maximum(sums[4], more[4]), tl.load(outside_ptr + rows, mask=inside, other=0.0))
        rest, largest, moment, squares, _ = merged(sums, only(more, in_short == 0))
        store_sums(out, rows, inside, stride_out, (rest, largest, moment, squares, below))


def find(
    logits: Listing,
    bracket: Tensor,
    wanted: Tensor,
    threshold: Tensor,
    out: Tensor,
    *,
    summed: int,
    count: bool,
    total: Tensor | None = None,
) -> Tensor:
    """Keys [m] of the thresholds, as `logitless_triton.rounds.search` has them; and what `kept_sums` finds.

    Args:
        bracket: [2, m], of `listed`, or from another threshold on.
        wanted: [m], Σ 2^((x−M)·f) that is enough; with `count`, a number of logits.
        threshold: [m], to be filled in.
        out: `SUMS` [5, m], to be filled in.
        summed: how many of the first four are, the last one also where it is more than two; 0: nothing is, which goes
            with `count`.
        total: [m] mass of all logits from another threshold on, where the bracket begins with it.
    """
    work, (rows, columns) = logits.work, logits.held.shape
    least, length = bracket.new_empty(rows), shortlist_length(columns)
    sizes, search = (blocks(work, most) | RESIDENT for most in (STEP, LOOK))
    near, short, size, above = bracket, work.empty(0), least, work.empty(0)
    if length:
        near, above = torch.empty_like(bracket), work.empty(2, rows)
        short, size = work.empty(rows, length), work.empty(rows, dtype=torch.int32)
        lengths = {"LENGTH": length, "SAMPLE": SAMPLE, "COUNT": count}
        sample = {name: sizes[name] for name in sizes if name != "BLOCK"} | {"NESTED": total is not None}
        whole = logits.mass if total is None else total
        logits.launch(_sample_kernel, logits.f, logits.top, whole, wanted, bracket, near, **lengths, **sample)
        own = (logits.f, logits.top, wanted, bracket, near, short, size, above, out)
        options = {"SUMMED": summed, "PART": search["BLOCK"], "stride_out": out.stride(0)}
        logits.launch(_split_kernel, *own, **options, **lengths, **sizes)
    own = (logits.outside, logits.f, logits.top, wanted, bracket, near, short, size, above, least, threshold, out)
    options = {"LENGTH": length, "SUMMED": summed, "COUNT": count, "stride_out": out.stride(0)}
    logits.launch(_find_kernel, *own, **options, **search)
    return least
