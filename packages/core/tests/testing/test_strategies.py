"""Strategies draw what the library takes, of every kind that they promise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

from logitless import LMHead, PackedBatch, reference
from logitless.packing import IGNORE_INDEX
from logitless.testing import Example, check_results
from logitless.testing.strategies import examples, heads, packed_batches, shards

few = settings(max_examples=30, deadline=None)


@few
@given(examples(dtype=torch.float32))
def test_examples_are_calls(example: Example) -> None:
    check_results(example.reference(), example)
    assert example.features <= {"bias", "softcap", "lora", "per_token_temperature"}


@few
@given(examples(refuses={"bias", "softcap", "lora", "per_token_temperature"}, min_tokens=1, vocab_size=None))
def test_what_is_refused_is_not_drawn(example: Example) -> None:
    assert not example.features
    assert len(example.labels) >= 1
    assert example.head.vocab_size is None


@few
@given(heads(max_vocab=9, bias=True))
def test_heads(head: LMHead) -> None:
    assert head.bias is not None
    assert len(head.weight) <= 9
    assert reference.head_logits(torch.ones(2, head.weight.shape[1]), head).shape == (2, len(head.weight))


@few
@given(packed_batches(20, first_id=3, min_length=1), st.randoms())
def test_packed_batches_come_home(batch: PackedBatch, random: object) -> None:
    true = batch.input_ids[batch.place_M]
    assert bool(((true >= 3) & (true < 20)).all())
    assert torch.equal(batch.pack(batch.unpack(batch.input_ids), of="prediction"), batch.input_ids)
    assert all(length >= 1 for length in batch.lengths)


@pytest.mark.parametrize("kind", ["padded", "nested", "list"])
def test_every_origin_is_drawn(kind: str) -> None:
    found = find(packed_batches(), lambda batch: batch.origin.kind == kind and batch.padded_lengths != batch.lengths)
    assert found.origin.kind == kind


@few
@given(shards())
def test_shards_are_all_of_a_batch(parts: list[PackedBatch]) -> None:
    size = len(parts)
    assert [part.shard_of[:2] for part in parts if part.shard_of] == [(rank, size) for rank in range(size)]
    assert sum(len(part.input_ids) for part in parts) == sum(parts[0].padded_lengths)
    live = sum(int((part.labels != IGNORE_INDEX).sum()) for part in parts)
    assert live <= sum(max(length - 1, 0) for length in parts[0].lengths)
