"""Which tiles of a row may hold what is kept: from their maxima and sums alone, before a logit is looked at.

A kept set is {x >= t}, so tiles whose maximum is less than t need not be read. A floor under t is known from the tiles'
partial statistics (m and s of `logitless_triton.forward`; E = 2^((m − M)·f) is a tile's largest term):

    top_k    as many tiles as k have a maximum of at least the floor
    top_p    what may lie below it is less than 1 − p of the mass: all of a tile with a lesser maximum, and of another
             s·E − E, or 2^((floor − M)·f) for each of its other columns, whichever is less

The floor is a high one that serves, by bisection.
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
from logitless_triton.listing import RESIDENT, Listing, blocks, factors, float_of, key_of, program_rows
from logitless_triton.tile import FLOOR, LOWEST, ceil_div

__all__ = ["listed", "normalisers"]

STEPS = tl.constexpr(16)  # half of them halve what is left of the values, half of the floats: tight wherever M lies


@triton.jit
def _tiles(parts, rows, inside, TILES, stride_kind, stride_tile, BLOCK: tl.constexpr):
    """Of the tiles [ROWS, BLOCK]: maxima, their s, their numbers, and which are real."""
    tiles = tl.arange(0, BLOCK)[None, :]
    mask = inside[:, None] & (tiles < TILES)
    at = parts + tiles.to(tl.int64) * stride_tile + rows[:, None]
    m = tl.load(at, mask=mask, other=LOWEST)
    m = tl.where(m > LOWEST, m, -float("inf"))  # again: the forward's are finite, for its differences
    return m, tl.load(at + stride_kind, mask=mask, other=0.0), tiles, mask


@triton.jit
def _terms(m, M, f):
    """2^((m − M)·f) [ROWS, BLOCK]."""
    return tl.exp2(tl.maximum((m - M[:, None]) * f[:, None], FLOOR))


@triton.jit
def _floor(m, top, mass, f, M, allowed, k, TILES, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """Floors [ROWS] under the thresholds.

    Args:
        m, top, mass: [ROWS, BLOCK] of tiles, the last two over M's term.
        allowed: [ROWS], the mass that may lie below.
    """
    others = tl.maximum(mass - top, 0.0)
    low = key_of(tl.full(M.shape, -float("inf"), tl.float32))  # serves, whatever there is
    high = key_of(M) + 1
    if COUNT:
        guess = tl.min(tl.where(m > -float("inf"), m, float("inf")), 1)
    else:  # as if all logits were at the floor
        guess = M + tl.log2(allowed / (TILES * WIDTH)) / f
    for step in range(STEPS):
        value = guess if step == 0 else float_of(low) * 0.5 + float_of(high) * 0.5
        halfway = low + ((high - low) >> 1)
        near = tl.minimum(tl.maximum(key_of(value), low), high - 1)  # also of infinities and NaN
        middle = tl.where(step % 2 == 0, near, halfway)
        level = float_of(middle)
        if COUNT:
            serves = tl.sum((m >= level[:, None]).to(tl.int32), 1) >= k
        else:
            most = tl.exp2((level - M) * f) * (WIDTH - 1)
            below = tl.where(m >= level[:, None], tl.minimum(others, most[:, None]), mass)
            serves = tl.sum(below, 1) < allowed
        low = tl.where(serves, middle, low)
        high = tl.where(serves, high, middle)
    return float_of(low)


@triton.jit
def _list(tile, floor, M, rows, inside, out, N, stride_ids, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Store a `Listing` of the tiles from a floor [ROWS] on, and between which keys the threshold lies."""
    m, mass, tiles, mask = tile
    ids, count_ptr, outside_ptr, mass_ptr, bracket = out
    chosen = (m >= floor[:, None]) & mask
    place = tl.cumsum(chosen.to(tl.int32), 1) - 1
    at = ids + rows.to(tl.int64)[:, None] * stride_ids + place
    tl.store(at, tl.broadcast_to(tiles, (ROWS, BLOCK)), mask=chosen)
    tl.store(count_ptr + rows, tl.sum(chosen.to(tl.int32), 1), mask=inside)
    tl.store(outside_ptr + rows, tl.max(tl.where(chosen, -float("inf"), m), 1), mask=inside)
    tl.store(mass_ptr + rows, tl.sum(tl.where(chosen, mass, 0.0), 1), mask=inside)
    tl.store(bracket + rows, key_of(floor), mask=inside)
    tl.store(bracket + N + rows, key_of(M) + 1, mask=inside)


@triton.jit(do_not_specialize=["N", "TILES", "stride_own", "stride_ids", "k"])
def _floor_kernel(
    parts,
    f_ptr,
    own,
    ids,
    count_ptr,
    outside_ptr,
    mass_ptr,
    bracket,
    N,
    TILES,
    stride_kind,
    stride_tile,
    stride_own,
    stride_ids,
    k,
    budget,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    ALONE: tl.constexpr,
):
    rows, inside = program_rows(N, ROWS)
    m, s, tiles, mask = _tiles(parts, rows, inside, TILES, stride_kind, stride_tile, BLOCK)
    f = tl.load(f_ptr + rows, mask=inside, other=0.0)
    M = tl.maximum(tl.max(m, 1), LOWEST)
    top = _terms(m, M, f)
    mass = top * s
    S = tl.sum(mass, 1)
    floor = _floor(m, top, mass, f, M, S * budget, k, TILES, WIDTH, COUNT)
    tl.store(own + rows, M, mask=inside)
    tl.store(own + stride_own + rows, S, mask=inside)
    tl.store(own + 2 * stride_own + rows, floor, mask=inside)
    if ALONE:
        out = (ids, count_ptr, outside_ptr, mass_ptr, bracket)
        _list((m, mass, tiles, mask), floor, M, rows, inside, out, N, stride_ids, ROWS, BLOCK)


@triton.jit(do_not_specialize=["N", "TILES", "stride_ids"])
def _list_kernel(
    parts,
    f_ptr,
    M_ptr,
    floor_ptr,
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
    m, s, tiles, mask = _tiles(parts, rows, inside, TILES, stride_kind, stride_tile, BLOCK)
    f, M = factors(f_ptr, M_ptr, rows, inside)
    floor = tl.load(floor_ptr + rows, mask=inside, other=0.0)
    out = (ids, count_ptr, outside_ptr, mass_ptr, bracket)
    _list((m, _terms(m, M, f) * s, tiles, mask), floor, M, rows, inside, out, N, stride_ids, ROWS, BLOCK)


def normalisers(ranks: Tensor, f: Tensor) -> Tensor:
    """M and S [2, m] of the whole vocabulary, of those of each rank [size, >= 2, m]."""
    top = ranks[:, 0].amax(0)
    return torch.stack((top, (ranks[:, 1] * ((ranks[:, 0] - top) * f).exp2()).sum(0)))


def listed(
    work: Any, held: Tensor, f: Tensor, parts: Tensor, group: Any, *, k: int | None, p: float | None
) -> tuple[Listing, Tensor, Tensor]:
    """The tiles that may hold what is kept; M and S [2, m]; between which keys [2, m] the threshold lies.

    Args:
        held: [m, whole tiles] logits.
        f: [m].
        parts: [3, tiles, >= m] of this rank's tiles.
        group: whose ranks look for one threshold, in all of their logits; None: in this rank's.
        k, p: how many logits are to be found, or which part of the mass.
    """
    count, tiles, sizes = f.shape[0], parts.shape[1], blocks(work) | RESIDENT
    sizes["BLOCK"] = max(16, triton.next_power_of_2(tiles))
    width, grid = sizes.pop("WIDTH"), (ceil_div(count, sizes["ROWS"]),)
    own = work.empty(3, count)
    ids, counts = work.empty(count, tiles, dtype=torch.int32), work.empty(count, dtype=torch.int32)
    outside, mass, bracket = work.empty(count), work.empty(count), work.empty(2, count, dtype=torch.int64)
    out, numbers = (ids, counts, outside, mass, bracket), (count, tiles, *parts.stride()[:2])
    # Half a percent of what is not kept, and 1e-5 of all, is left to rounding.
    budget = 0.0 if p is None else max(0.0, 0.995 * (1.0 - p) - 1e-5)
    strides, options = (own.stride(0), ids.stride(0)), {"COUNT": k is not None, "ALONE": group is None}
    _floor_kernel[grid](parts, f, own, *out, *numbers, *strides, k or 0, budget, WIDTH=width, **options, **sizes)
    whole = own[:2]
    if group is not None:  # k logits of one rank are k of all; of the mass, each rank may leave out its own part
        ranks = gather_stacked(own, group)
        floor = ranks[:, 2].amax(0) if k is not None else ranks[:, 2].amin(0)
        whole = normalisers(ranks, f)
        _list_kernel[grid](parts, f, whole[0], floor, *out, *numbers, ids.stride(0), **sizes)
    return Listing(work, held, f, whole[0], ids, counts, outside, mass), whole, bracket
