"""What a call allocates, multiplies and leaves unwritten is seen, inside of the ops too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from logitless.testing import (
    AllocationGuard,
    LogitsGuard,
    MemoryTracker,
    ProductCounter,
    ReferenceBackend,
    installed,
    poisoned,
    random_example,
)


def test_memory_is_counted_until_it_is_freed() -> None:
    with MemoryTracker() as tracker:
        kept = torch.zeros(1000)
        view = kept.view(10, 100)
        assert tracker.live_bytes == 4000
        gone = torch.zeros(500) + 1
        assert (tracker.live_bytes, tracker.peak_bytes) == (6000, 8000)
        del gone
        assert tracker.live_bytes == 4000
        del kept
        assert tracker.live_bytes == 4000
        del view
        assert tracker.live_bytes == 0
        torch.zeros(10).add_(1)
    assert (tracker.peak_bytes, tracker.largest_bytes) == (8000, 4000)


def test_what_was_there_before_is_not_counted() -> None:
    before = torch.zeros(1000)
    with MemoryTracker() as tracker:
        before.add_(1).view(10, 100)[0].mul_(2)
    assert tracker.peak_bytes == 0


def test_memory_is_seen_inside_of_the_ops() -> None:
    example = random_example(40, vocab=300, dtype=torch.float32)
    with installed(ReferenceBackend(), alone=True):
        with MemoryTracker() as tracker:
            example.run()
        assert tracker.peak_bytes > 2 * 30 * 300 * 4
        with AllocationGuard(40 * 300 * 4), torch.no_grad():
            example.score()
        with pytest.raises(AssertionError, match=r"\(40, 300\) torch.float32: 48000 bytes, allowed 47999"):
            guarded(example, 47999)


def guarded(example: Any, limit: int) -> None:
    with AllocationGuard(limit), torch.no_grad():
        replace(example, labels=example.labels.clamp(min=0)).score()


def test_products_are_counted() -> None:
    a, b, c = torch.ones(3, 4), torch.ones(4, 5), torch.ones(2, 3, 4)
    with ProductCounter() as counter:
        a @ b
        torch.addmm(torch.ones(3, 5), a, b)
        torch.nn.functional.linear(a, b.T)
        assert (counter.calls, counter.flops) == (3, 3 * 2 * 60)
        c @ b
        a @ b[:, 0]
        a.mul(2).sum()
    assert (counter.calls, counter.flops) == (5, 3 * 120 + 240 + 24)


def test_poisoned_memory_reads_as_nan_and_goes_again() -> None:
    before = (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    with poisoned():
        x = torch.ones(3, requires_grad=True)
        for made in (torch.empty(5), torch.empty_like(x), x.detach().new_empty(2), torch.empty_strided((2, 2), (2, 1))):
            assert made.isnan().all()
        assert (torch.empty(3, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
        seen = []
        x.register_hook(lambda grad: seen.append(torch.empty(4)))
        x.sum().backward()
        assert seen[0].isnan().all()
    with pytest.raises(KeyError), poisoned():
        raise KeyError
    assert (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory) == before


def test_logits_are_told_from_other_tensors() -> None:
    example = random_example(40, vocab=300, dtype=torch.float32).fresh()
    with installed(ReferenceBackend(), alone=True), LogitsGuard(40, 300):
        example.pull(example.score())  # the reference holds them, but inside of the op
        torch.ones(39, 300), torch.ones(300, 39), torch.ones(1000, 1000)
        with pytest.raises(AssertionError, match=r"made \(1, 40, 300\) torch.float32: logits of 40 tokens or more"):
            torch.ones(1, 40, 300)
