"""Batches: token sequences sorted by length and padded on the right, within a budget of tokens.

Shape suffixes: B sequences, T the length of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["IGNORED", "Batch", "TokenSequence", "collate", "plan"]

IGNORED = -100


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One record as tokens: `ids[prompt_length:]` is scored, and 1 <= prompt_length < len(ids)."""

    record: int
    ids: list[int]
    prompt_length: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What the model is called with: int64 [B, T] each."""

    input_ids: Tensor
    attention_mask: Tensor
    shift_labels: Tensor  # at position t the token that follows it, if that is scored; else `IGNORED`


def plan(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of `lengths` by batch, so that longest · count <= `max_tokens` in each.

    The longest come first, so that a batch that does not fit in memory fails at once. One that is longer than the
    budget goes alone.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def collate(sequences: Sequence[TokenSequence], device: torch.device) -> Batch:
    """The sequences as one batch, padded on the right: there, no padding is attended to whatever its token id."""
    longest = max(len(sequence.ids) for sequence in sequences)
    input_ids_BT = torch.zeros(len(sequences), longest, dtype=torch.int64)
    attention_mask_BT = torch.zeros_like(input_ids_BT)
    shift_labels_BT = torch.full_like(input_ids_BT, IGNORED)
    for row, sequence in enumerate(sequences):
        length, start = len(sequence.ids), sequence.prompt_length
        ids = torch.tensor(sequence.ids, dtype=torch.int64)
        input_ids_BT[row, :length] = ids
        attention_mask_BT[row, :length] = 1
        shift_labels_BT[row, start - 1 : length - 1] = ids[start:]
    return Batch(input_ids_BT.to(device), attention_mask_BT.to(device), shift_labels_BT.to(device))
