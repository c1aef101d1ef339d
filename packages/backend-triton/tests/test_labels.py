"""Several labels of a token in one pass: with and without a kept set, some ignored, some the same token."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from full_logits import DEVICE, FULL, check, example_of, several, truth

import logitless

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(
    ("option", "kept"),
    [({}, {}), (FULL, {"top_k": 9}), (FULL, {"top_p": 0.7, "validate": False})],
    ids=["plain", "full-k", "full-p"],
)
def test_equals_the_logits_in_full(option: dict[str, Any], kept: dict[str, Any]) -> None:
    check(several(**option), keep_bytes=1 << 20, **kept)


def test_float16_and_chunks() -> None:
    check(several(dtype=torch.float16), workspace_bytes=8000, top_k=9)


def test_float16_gradients_neither_vanish_nor_overflow() -> None:
    example = several(dtype=torch.float16)
    small = replace(
        example, grad_log_probs=example.grad_log_probs * 1e-6, grad_entropy=torch.zeros_like(example.grad_entropy)
    )
    buffer = torch.zeros_like(example.head.weight, dtype=torch.float32)
    small.with_head(grad_buffer=buffer).run(backend="triton", frozen=("hidden",))
    right = truth(small).gradients["weight"]
    assert right is not None
    assert float((buffer.double() - right).norm() / right.norm()) < 2.0**-10


def test_one_of_one_equals_one() -> None:
    example = example_of()
    column = replace(example, labels=example.labels.unsqueeze(1), grad_log_probs=example.grad_log_probs.unsqueeze(1))
    for kept in ({}, {"top_k": 5}):
        single, got = example.run(backend="triton", **kept), column.run(backend="triton", **kept)
        torch.testing.assert_close(got.scores.log_probs.squeeze(1), single.scores.log_probs, rtol=1e-5, atol=1e-5)
        assert torch.equal(got.scores.entropy, single.scores.entropy)
        for name, grad in single.gradients.items():
            torch.testing.assert_close(got.gradients[name], grad, rtol=1e-4, atol=1e-5)


def test_confident_labels_keep_their_digits() -> None:
    hidden = torch.ones(1, 1, device=DEVICE, requires_grad=True)
    weight = torch.tensor([[12.0], [0.0], [1.0]], device=DEVICE)
    labels = torch.tensor([[0, 1]], device=DEVICE)
    out = logitless.linear_log_probs(hidden, weight, labels, entropy=False, backend="triton")
    rest = math.exp(-12) + math.exp(-11)
    assert out.log_probs[0, 0].item() == pytest.approx(-math.log1p(rest), rel=5e-3)
    (grad,) = torch.autograd.grad(out.log_probs[0, 0], hidden)
    p = [math.exp(x - 12) / (1 + rest) for x in (0, 1)]
    assert grad.item() == pytest.approx(12 * sum(p) - p[1], rel=5e-3)


def test_bad_labels_unvalidated_are_not_a_number() -> None:
    example = several(4, 3)
    labels = torch.tensor([[1, 2, 3], [1, 999, -100], [-100, -100, -100], [0, -100, 1]], device=DEVICE)
    out = replace(example, labels=labels).score(backend="triton", validate=False)
    assert out.log_probs.isnan().tolist() == [[False] * 3, [False, True, False], [False] * 3, [False] * 3]
    assert out.log_probs[2].count_nonzero() == 0
