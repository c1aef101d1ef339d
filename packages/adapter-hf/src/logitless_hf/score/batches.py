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
    """Indices of `lengths` by batch: longest · count <= `max_tokens` in each, and no more than a quarter is padding.

    The longest come first, so that a batch that does not fit in memory fails at once. One that is longer than the
    budget goes alone. Without the second rule a part of mixed lengths would mostly be padding, which a model computes
    like any token.
    """
    batches: list[list[int]] = []
    longest = total = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        padded = longest * (len(batches[-1]) + 1) if batches else 0
        if batches and padded <= max_tokens and 4 * (total + lengths[index]) >= 3 * padded:
            batches[-1].append(index)
            total += lengths[index]
        else:
            batches.append([index])
            longest = total = lengths[index]
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
