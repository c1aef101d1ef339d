"""Which tiles of a row may hold what is kept: from their maxima and sums alone, before a logit is looked at.

A kept set is {x >= t}, so tiles whose maximum is less than t need not be read. A floor under t is known from the tiles'
partial statistics (m and s of `logitless_triton.forward`; E = 2^((m − M)·f) is a tile's largest term):

    top_k    as many tiles as k have a maximum of at least the floor
    top_p    what may lie below it is less than 1 − p of the mass: all of a tile with a lesser maximum, and of another
             s·E − E, or 2^((floor − M)·f) for each of its other columns, whichever is less

The floor is the highest that serves, by bisection over the floats in the order of their bits.
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
from logitless_triton.listing import Listing, blocks, factors, float_of, key_of, program_rows
from logitless_triton.tile import LOWEST, ceil_div

__all__ = ["listed"]


@triton.jit
def _maxima(parts, rows, inside, TILES, stride_tile, BLOCK: tl.constexpr):
    """Maxima [ROWS, BLOCK] of the tiles, their numbers, where they were read, and which are real."""
    tiles = tl.arange(0, BLOCK)[None, :]
    mask = inside[:, None] & (tiles < TILES)
    at = parts + tiles.to(tl.int64) * stride_tile + rows[:, None]
    m = tl.load(at, mask=mask, other=LOWEST)
    m = tl.where(m > LOWEST, m, -float("inf"))  # again: the forward's are finite, for its differences
    return m, tiles, at, mask


@triton.jit(do_not_specialize=["N", "TILES", "stride_own", "k"])
def _floor_kernel(
    parts,
    own,
    f_ptr,
    floor_ptr,
    N,
    TILES,
    stride_kind,
    stride_tile,
    stride_own,
    k,
    budget,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    rows, inside = program_rows(N, ROWS)
    m, _, at, mask = _maxima(parts, rows, inside, TILES, stride_tile, BLOCK)
    f, M = factors(f_ptr, own, rows, inside)
    allowed = tl.load(own + stride_own + rows, mask=inside, other=0.0) * budget
    top = tl.exp2((m - M[:, None]) * f[:, None])
    mass = top * tl.load(at + stride_kind, mask=mask, other=0.0)
    others = tl.maximum(mass - top, 0.0)
    low = key_of(tl.full((ROWS,), -float("inf"), tl.float32))  # serves, whatever there is
    high = key_of(M) + 1
    for _ in range(32):
        middle = low + ((high - low) >> 1)
        level = float_of(middle)
        if COUNT:
            serves = tl.sum((m >= level[:, None]).to(tl.int32), 1) >= k
        else:
            most = tl.exp2((level - M) * f) * (WIDTH - 1)
            below = tl.where(m >= level[:, None], tl.minimum(others, most[:, None]), mass)
            serves = tl.sum(below, 1) < allowed
        low = tl.where(serves, middle, low)
        high = tl.where(serves, high, middle)
    tl.store(floor_ptr + rows, float_of(low), mask=inside)


@triton.jit(do_not_specialize=["N", "TILES", "stride_ids"])
def _list_kernel(
    parts,
    floor_ptr,
    f_ptr,
    M_ptr,
    ids,
    count_ptr,
    outside_ptr,
    mass_ptr,
    bracket,
    N,
    TILES,
    stride_kind,
    stride_tile,
    stride_ids,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows, inside = program_rows(N, ROWS)
    m, tiles, source, mask = _maxima(parts, rows, inside, TILES, stride_tile, BLOCK)
    f, M = factors(f_ptr, M_ptr, rows, inside)
    floor = tl.load(floor_ptr + rows, mask=inside, other=0.0)
    chosen = (m >= floor[:, None]) & mask
    place = tl.cumsum(chosen.to(tl.int32), 1) - 1
    at = ids + rows.to(tl.int64)[:, None] * stride_ids + place
    tl.store(at, tl.broadcast_to(tiles, (ROWS, BLOCK)), mask=chosen)
    tl.store(count_ptr + rows, tl.sum(chosen.to(tl.int32), 1), mask=inside)
    tl.store(outside_ptr + rows, tl.max(tl.where(chosen, -float("inf"), m), 1), mask=inside)
    s = tl.load(source + stride_kind, mask=chosen, other=0.0)
    mass = tl.where(chosen, tl.exp2((m - M[:, None]) * f[:, None]) * s, 0.0)
    tl.store(mass_ptr + rows, tl.sum(mass, 1), mask=inside)
    tl.store(bracket + rows, key_of(floor), mask=inside)
    tl.store(bracket + N + rows, key_of(M) + 1, mask=inside)


def listed(
    work: Any,
    held: Tensor,
    f: Tensor,
    parts: Tensor,
    own: Tensor,
    top: Tensor,
    group: Any,
    *,
    k: int | None,
    p: float | None,
) -> tuple[Listing, Tensor]:
    """The tiles that may hold what is kept, and between which keys [2, m] the threshold lies.

    Args:
        held: [m, whole tiles] logits.
        parts: [3, tiles, >= m] of this rank's tiles.
        own: [3, >= m], M, S and T of this rank.
        top: [m], M of all ranks.
        k, p: how many logits are to be found, or which part of the mass.
    """
    count, tiles, sizes = f.shape[0], parts.shape[1], blocks(work)
    sizes["BLOCK"] = max(16, triton.next_power_of_2(tiles))
    width, grid, floor = sizes.pop("WIDTH"), (ceil_div(count, sizes["ROWS"]),), work.empty(count)
    # Half a percent of what is not kept, and 1e-5 of all, is left to rounding.
    budget = 0.0 if p is None else max(0.0, 0.995 * (1.0 - p) - 1e-5)
    numbers = (count, tiles, *parts.stride()[:2])
    wanted = (own.stride(0), k or 0, budget)
    _floor_kernel[grid](parts, own, f, floor, *numbers, *wanted, WIDTH=width, COUNT=k is not None, **sizes)
    if group is not None:  # k logits of one rank are k of all; of the mass, each rank may leave out its own part
        ranks = gather_stacked(floor, group)
        floor = ranks.amax(0) if k is not None else ranks.amin(0)
    ids, counts = work.empty(count, tiles, dtype=torch.int32), work.empty(count, dtype=torch.int32)
    found = Listing(work, held, f, top, ids, counts, work.empty(count), work.empty(count))
    bracket = work.empty(2, count, dtype=torch.int64)
    out = (ids, counts, found.outside, found.mass, bracket)
    _list_kernel[grid](parts, floor, f, top, *out, *numbers, ids.stride(0), **sizes)
    return found, bracket
