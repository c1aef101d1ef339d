from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from logitless_hf.score.batches import IGNORED, TokenSequence, collate, plan


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_every_sequence_is_in_one_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = plan(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = max(lengths[index] for index in batch) * len(batch)
        assert len(batch) == 1 or padded <= budget
        assert sum(lengths[index] for index in batch) >= 0.75 * padded


def test_batches_are_filled_with_neighbours_in_length() -> None:
    assert plan([3, 9, 4, 10, 3], 20) == [[3, 1], [2, 0, 4]]
    assert plan([3, 9, 4, 10, 3], 1000) == [[3, 1, 2], [0, 4]]  # 23 tokens of 30, then 6 of 6
    assert plan([30, 5, 5], 10) == [[0], [1, 2]]  # longer than the budget: alone
    assert plan([], 10) == []


def test_collate_scores_the_completion_only() -> None:
    batch = collate([TokenSequence(0, [5, 6, 7, 8], 2), TokenSequence(1, [9, 3], 1)], torch.device("cpu"))
    assert batch.input_ids.tolist() == [[5, 6, 7, 8], [9, 3, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.shift_labels.tolist() == [[IGNORED, 7, 8, IGNORED], [3, IGNORED, IGNORED, IGNORED]]
