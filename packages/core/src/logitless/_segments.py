"""Index arithmetic of sequences that stand one after another in a row; lengths are on the host, indices on a device.

Shape suffixes: M tokens of all sequences, P tokens of one shard.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from logitless.errors import InvalidInputError

__all__ = [
    "Scheme",
    "cumulated",
    "fill_bins",
    "jagged_values",
    "last_tokens",
    "lengths_fields",
    "placed",
    "ramp",
    "shard_index",
    "split_bins",
]

Scheme = Literal["zigzag", "contiguous"]


def ramp(lengths: Sequence[int], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """For sequences of these lengths in one row: each token's sequence, and its offset in it."""
    total = sum(lengths)
    counts = torch.tensor(lengths, dtype=torch.int64, device=device)
    begins = torch.tensor(cumulated(lengths)[:-1], dtype=torch.int64, device=device)
    row = torch.repeat_interleave(counts, output_size=total)
    return row, torch.arange(total, device=device) - begins.index_select(0, row)


def cumulated(lengths: Sequence[int]) -> list[int]:
    total, out = 0, [0]
    for length in lengths:
        out.append(total := total + length)
    return out


def last_tokens(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """Index of each sequence's last token among the true tokens; empty sequences have none."""
    ends = [end - 1 for end, length in zip(cumulated(lengths)[1:], lengths, strict=True) if length]
    return torch.tensor(ends, dtype=torch.int64, device=device)


def placed(x: Tensor, index: Tensor, size: int, fill: float) -> Tensor:
    """[size, ...] with x's rows at these indices, and `fill` elsewhere."""
    return x.new_full((size, *x.shape[1:]), fill).index_copy(0, index, x)


def shard_index(
    padded_lengths: Sequence[int], rank: int, size: int, scheme: Scheme, device: torch.device | str
) -> Tensor:
    """[P] which packed tokens are a rank's, in the order in which it holds them."""
    total = sum(padded_lengths)
    if scheme == "contiguous":
        if total % size:
            raise InvalidInputError(f"size: got {size}, which does not divide {total} tokens; pack with align={size}")
        return torch.arange(rank * (total // size), (rank + 1) * (total // size), device=device)
    if scheme != "zigzag":
        raise InvalidInputError(f"scheme: got {scheme!r}, expected 'zigzag' or 'contiguous'")
    for i, length in enumerate(padded_lengths):
        if length % (2 * size):
            raise InvalidInputError(
                f"size: sequence {i} has {length} packed tokens, expected a multiple of {2 * size}; "
                f"pack with align={2 * size}"
            )
    row_P, offset_P = ramp([length // size for length in padded_lengths], device)
    chunk_P = torch.tensor([length // (2 * size) for length in padded_lengths], dtype=torch.int64, device=device)[row_P]
    begin_P = torch.tensor(cumulated(padded_lengths)[:-1], dtype=torch.int64, device=device)[row_P]
    late_P = offset_P >= chunk_P
    return begin_P + offset_P + torch.where(late_P, (2 * size - 2 - rank) * chunk_P, rank * chunk_P)


def fill_bins(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing, then the same number of bins filled evenly if that fits the capacity as well."""
    by_size = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    bins: list[list[int]] = []
    room: list[int] = []
    for i in by_size:
        at = next((b for b, free in enumerate(room) if free >= sizes[i]), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(capacity)
        bins[at].append(i)
        room[at] -= sizes[i]
    even: list[list[int]] = [[] for _ in bins]
    loads = [(0, b) for b in range(len(bins))]
    for i in by_size:
        load, b = heapq.heappop(loads)
        even[b].append(i)
        heapq.heappush(loads, (load + sizes[i], b))
    return even if max((load for load, _ in loads), default=0) <= capacity else bins


def split_bins(bins: list[list[int]], sizes: Sequence[int], count: int) -> list[list[int]]:
    """`count` bins out of `fill_bins`'s: the fullest that can be split is, again and again; then empty ones."""
    bins = [list(members) for members in bins]
    while len(bins) < count:
        fullest = max(
            (members for members in bins if len(members) > 1),
            key=lambda members: sum(sizes[i] for i in members),
            default=None,
        )
        if fullest is None:
            bins.append([])
            continue
        bins.append(fullest[1::2])  # in a bin the largest come first
        fullest[:] = fullest[0::2]
    return bins


def lengths_fields(lengths: Sequence[int], padded_lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """The fields of a batch that follow from its lengths alone."""
    cu_seqlens = torch.tensor(cumulated(lengths), dtype=torch.int32, device=device)
    cu_seqlens_padded = torch.tensor(cumulated(padded_lengths), dtype=torch.int32, device=device)
    if list(lengths) == list(padded_lengths):
        place_M = torch.arange(sum(lengths), device=device)
    else:
        row_M, offset_M = ramp(lengths, device)
        place_M = cu_seqlens_padded.long().index_select(0, row_M) + offset_M
    return {
        "lengths": tuple(lengths),
        "padded_lengths": tuple(padded_lengths),
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_padded": cu_seqlens_padded,
        "max_seqlen": max(padded_lengths, default=0),
        "place_M": place_M,
    }


def jagged_values(x: Any) -> tuple[Tensor, list[int]]:
    """A jagged tensor's true entries, one after another, and their lengths: one device-to-host copy."""
    if x._ragged_idx != 1:
        raise InvalidInputError(
            "nested tensor: its ragged dimension is not the second; transpose it back to [B, j, ...]"
        )
    offsets = x.offsets()
    if x.lengths() is None:
        bounds = offsets.tolist()
        return x.values()[bounds[0] : bounds[-1]], [b - a for a, b in pairwise(bounds)]
    lengths = x.lengths().tolist()
    row_M, offset_M = ramp(lengths, x.values().device)
    return x.values().index_select(0, offsets.index_select(0, row_M) + offset_M), lengths
