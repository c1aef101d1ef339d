"""The most likely tokens: ids, ties, log-probs and their gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from full_logits import DEVICE, FULL, HAS_GPU, example_of

from logitless import LMHead, reference, top_k_log_probs
from logitless.testing import AllocationGuard

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


NEGATIVE = {"scale": -0.7, "bias": True}


@pytest.mark.parametrize(
    ("k", "option"),
    [(1, {}), (7, NEGATIVE), (7, FULL), (290, FULL)],
    ids=["1-plain", "7-negative", "7-full", "290-full"],
)
def test_of_a_whole_head(k: int, option: dict[str, Any]) -> None:
    example = example_of(9, ignored=False, **option)
    exact = example.to(torch.float64)
    ids, log_probs = top_k_log_probs(
        example.hidden, example.head, k, temperature=example.temperature, backend="triton", workspace_bytes=8000
    )
    want_ids, want = reference.top_k_log_probs(exact.hidden, exact.head, k, temperature=exact.temperature)
    torch.testing.assert_close(log_probs.double(), want, rtol=1e-5, atol=2e-5)
    if k < 290:
        assert torch.equal(ids, want_ids)
    else:  # neighbours may lie closer than float32 tells
        assert torch.equal(ids.sort(1).values, want_ids.sort(1).values)


@pytest.mark.parametrize("k", [1, 60, 300])
def test_of_equal_logits_the_lowest_id_comes_first(k: int) -> None:
    """Whole logits, most of them equal to others, within a tile and across tiles."""
    noise = torch.Generator().manual_seed(0)
    hidden, weight = torch.eye(6), torch.randn(300, 6, generator=noise).round()
    weight[:, 0] = 1.0
    ids, log_probs = top_k_log_probs(hidden.to(DEVICE), weight.to(DEVICE), k, backend="triton")
    want_ids, want = reference.top_k_log_probs(hidden, LMHead(weight), k)
    assert torch.equal(ids.cpu(), want_ids)
    torch.testing.assert_close(log_probs.cpu(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", [{}, {**FULL, "softcap": None}, FULL], ids=["plain", "uncapped", "full"])
def test_a_scale_of_0_makes_ties_of_all(option: dict[str, Any]) -> None:
    example = example_of(4, ignored=False, **option | {"scale": 0.0})
    ids, log_probs = top_k_log_probs(example.hidden, example.head, 5, temperature=example.temperature, backend="triton")
    assert ids.tolist() == [list(range(5))] * 4
    right = torch.full((4, 5), -math.log(option.get("vocab_size", 300)), device=DEVICE)
    torch.testing.assert_close(log_probs, right)


@pytest.mark.parametrize("k", [3, 5])
def test_columns_of_minus_infinity_come_last_by_id(k: int) -> None:
    """As many tiles as k, or fewer; most of them without a finite logit."""
    bias = torch.full((300,), -math.inf, device=DEVICE)
    bias[3], bias[8] = 1.0, 2.0
    head = LMHead(torch.zeros(300, 2, device=DEVICE), bias)
    ids, log_probs = top_k_log_probs(torch.zeros(1, 2, device=DEVICE), head, k, backend="triton")
    assert ids.tolist() == [[8, 3, 0, 1, 2][:k]]
    assert log_probs[0, 2:].tolist() == [-math.inf] * (k - 2)


def test_not_a_number_gives_ids_that_can_be_used() -> None:
    example = example_of(4, ignored=False)
    example.hidden[1] = math.nan
    ids, log_probs = top_k_log_probs(example.hidden, example.head, 5, backend="triton")
    assert log_probs.isnan().all(1).tolist() == [False, True, False, False]
    assert torch.all((ids >= 0) & (ids < 300))


def test_gradients_and_a_mask() -> None:
    example = example_of(6)
    mask = torch.arange(6, device=DEVICE) % 3 == 0
    fresh, exact = example.fresh(), example.to(torch.float64).fresh()
    ids, got = top_k_log_probs(fresh.hidden, fresh.head, 4, mask=mask, backend="triton")
    want_ids, want = reference.top_k_log_probs(exact.hidden, exact.head, 4)
    assert torch.equal(ids[mask], want_ids[mask])
    assert torch.all(ids[~mask] == -100)
    assert got[~mask].count_nonzero() == 0
    upstream = torch.randn(got.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mine = torch.autograd.grad(got, list(fresh.leaves().values()), upstream)
    right = torch.autograd.grad(want[mask], list(exact.leaves().values()), upstream[mask].double())
    for a, b in zip(mine, right, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(HAS_GPU, reason="what the kernels' launchers allocate is seen on the CPU")
def test_no_logits_in_full() -> None:
    example = example_of(12, vocab=1000, hidden_size=16)
    with torch.no_grad(), AllocationGuard(1 << 14):
        top_k_log_probs(example.hidden, example.head, 20, workspace_bytes=1 << 14, backend="triton")
