"""The specification against values made from the definition, not from this code."""

from __future__ import annotations

import math

import pytest
import torch

from logitless import LMHead, reference
from logitless.testing import Case, cases

each_case = pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)


def close(got: torch.Tensor | None, right: torch.Tensor | None) -> None:
    torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-12)


@each_case
def test_values(case: Case) -> None:
    got = case.build().reference()
    close(got.scores.log_probs, case.expected.scores.log_probs)
    close(got.scores.entropy, case.expected.scores.entropy)


@each_case
def test_gradients(case: Case) -> None:
    got, expected = case.build().reference().gradients, case.expected.gradients
    assert got.keys() == expected.keys()
    for name in got:
        close(got[name], expected[name])


def test_there_are_all_cases() -> None:
    assert len(cases()) == 13
    assert len({case.id for case in cases()}) == 13


def test_equals_its_docstring() -> None:
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(5, 4), torch.randn(7, 4), torch.tensor([0, 6, 2, 2, 5])
    log_p = (hidden @ weight.T / 0.7).log_softmax(-1)
    out = reference.linear_log_probs(hidden, LMHead(weight), labels, temperature=0.7)
    torch.testing.assert_close(out.log_probs, log_p.gather(-1, labels[:, None])[:, 0])
    torch.testing.assert_close(out.entropy, -(log_p.exp() * log_p).sum(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_computes_in_float32_at_least(dtype: torch.dtype) -> None:
    hidden, weight = torch.randn(3, 4, dtype=dtype), torch.randn(5, 4, dtype=dtype)
    out = reference.linear_log_probs(hidden, LMHead(weight), torch.tensor([0, 1, 2]))
    assert out.log_probs.dtype == torch.promote_types(dtype, torch.float32)


def test_uniform_distribution_has_the_entropy_of_its_size() -> None:
    out = reference.linear_log_probs(torch.zeros(1, 2), LMHead(torch.randn(9, 2), vocab_size=8), torch.tensor([3]))
    assert out.log_probs.item() == pytest.approx(-math.log(8))
    assert out.entropy is not None
    assert out.entropy.item() == pytest.approx(math.log(8))
