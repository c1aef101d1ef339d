from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from logitless_hf.score.batches import TokenSequence, pack, plan


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120), st.booleans())
def test_every_sequence_is_in_one_batch_within_the_budget(lengths: list[int], budget: int, padded: bool) -> None:
    batches = plan(lengths, budget, padded=padded)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        total, rows = sum(lengths[index] for index in batch), max(lengths[index] for index in batch) * len(batch)
        assert len(batch) == 1 or (rows if padded else total) <= budget
        assert not padded or total >= 0.75 * rows


def test_batches_are_filled_with_neighbours_in_length() -> None:
    assert plan([3, 9, 4, 10, 3], 20) == [[3, 1], [2, 0, 4]]
    assert plan([3, 9, 4, 10, 3], 23) == [[3, 1, 2], [0, 4]]
    assert plan([3, 9, 4, 10, 3], 1000) == [[3, 1, 2, 0, 4]]
    assert plan([3, 9, 4, 10, 3], 1000, padded=True) == [[3, 1, 2], [0, 4]]  # 23 tokens of 30, then 6 of 6
    assert plan([3, 9, 4, 10, 3], 29, padded=True) == [[3, 1], [2, 0, 4]]  # three rows would be of 30
    assert plan([30, 5, 5], 10) == [[0], [1, 2]]  # longer than the budget: alone
    assert plan([], 10) == []


def test_pack_scores_the_completion_only() -> None:
    batch = pack([TokenSequence(0, [5, 6, 7, 8], 2), TokenSequence(1, [9, 3], 1)], torch.device("cpu"))
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 3]
    assert batch.labels.tolist() == [-100, 7, 8, -100, 3, -100]
    assert batch.cu_seqlens.tolist() == [0, 4, 6]
