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


def test_kept_sets_of_five_tokens() -> None:
    """Probabilities 0.4, 0.3, 0.15, 0.1, 0.05, and a tie."""
    z = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15], dtype=torch.float64).log()
    assert reference.keep(z).all()
    assert reference.keep(z, top_k=2).tolist() == [False, True, False, True, False]
    assert reference.keep(z, top_p=0.39).tolist() == [False, True, False, False, False]
    assert reference.keep(z, top_p=0.41).tolist() == [False, True, False, True, False]
    assert reference.keep(z, top_p=0.71).tolist() == [False, True, False, True, True]
    assert reference.keep(z, top_k=2, top_p=0.56).tolist() == [False, True, False, False, False]  # 4/7 of the two
    tied = torch.tensor([1.0, 2.0, 1.0, 0.0])
    assert reference.keep(tied, top_k=2).tolist() == [True, True, True, False]
    assert reference.keep(tied, top_p=0.62).tolist() == [True, True, True, False]
    assert bool(reference.keep(torch.tensor([60.0, 0.0]), top_p=1.0).all())  # 1 − p of the first is rounded to 0


def test_scores_of_a_kept_set() -> None:
    weight = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64).log().unsqueeze(1)
    hidden, labels = torch.ones(3, 1, dtype=torch.float64), torch.tensor([[0, -100], [1, 3], [-100, -100]])
    out = reference.linear_log_probs(
        hidden, LMHead(weight), labels, top_k=2, stats=("sum_sq_probs", "mean_logit", "is_argmax", "is_kept")
    )
    close(out.log_probs.exp(), torch.tensor([[4 / 7, 1], [3 / 7, 1 / 8], [1, 1]], dtype=torch.float64))
    assert out.entropy is not None
    entropy = -(4 / 7 * math.log(4 / 7) + 3 / 7 * math.log(3 / 7))
    close(out.entropy, torch.tensor([entropy, entropy, 0.0], dtype=torch.float64))
    assert out.stats is not None
    close(out.stats["sum_sq_probs"], torch.tensor([25 / 49, 25 / 49, 0.0], dtype=torch.float64))
    mean = float(weight.mean())
    close(out.stats["mean_logit"], torch.tensor([mean, mean, 0.0], dtype=torch.float64))
    assert out.stats["is_argmax"].tolist() == [[True, False], [False, False], [False, False]]
    assert out.stats["is_kept"].tolist() == [[True, False], [True, False], [False, False]]


def test_the_most_likely_tokens() -> None:
    weight = torch.tensor([1.0, 2.0, 1.0, 0.0, 2.0]).unsqueeze(1)
    ids, log_probs = reference.top_k_log_probs(torch.ones(1, 1), LMHead(weight), 3)
    assert ids.tolist() == [[1, 4, 0]]
    torch.testing.assert_close(log_probs, weight.squeeze(1).log_softmax(0)[ids])
