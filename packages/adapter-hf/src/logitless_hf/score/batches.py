"""Batches: token sequences sorted by length, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from logitless import PackedBatch

__all__ = ["TokenSequence", "pack", "plan"]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One record as tokens: `ids[prompt_length:]` is scored, and 1 <= prompt_length < len(ids)."""

    record: int
    ids: list[int]
    prompt_length: int
    rollout_log_probs: list[float] | None = None  # of the completion's tokens, by the engine that sampled them


def plan(lengths: Sequence[int], max_tokens: int, *, padded: bool = False) -> list[list[int]]:
    """Indices of `lengths` by batch, each of at most `max_tokens` tokens; one that is longer goes alone.

    The longest come first, so that a batch that does not fit in memory fails at once.

    Args:
        lengths: of the sequences.
        max_tokens: of one batch.
        padded: the batch will be rows as long as its longest sequence: padding counts, and is no more than a quarter,
            since a model computes it like any token.
    """
    batches: list[list[int]] = []
    longest = total = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        more = total + lengths[index]
        size = longest * (len(batches[-1]) + 1) if padded and batches else more
        if batches and size <= max_tokens and 4 * more >= 3 * size:
            batches[-1].append(index)
            total = more
        else:
            batches.append([index])
            longest = total = lengths[index]
    return batches


def pack(sequences: Sequence[TokenSequence], device: torch.device) -> PackedBatch:
    """The sequences in one row, with their completions as labels."""
    scored = [[0] * one.prompt_length + [1] * (len(one.ids) - one.prompt_length) for one in sequences]
    return PackedBatch.from_sequences([one.ids for one in sequences], loss_mask=scored, device=device)
