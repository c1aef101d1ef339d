"""How far results may be off: what rounding costs is allowed, and what is off is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import logitless
from logitless.testing import check_gradients, check_results, check_scores, floor_gradients, random_example
from logitless.testing.divergence import check_divergence, random_divergence


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_floor_is_what_one_rounding_costs(dtype: torch.dtype) -> None:
    example = random_example(60, vocab=200, dtype=dtype, lora=(3,), bias=True)
    truth, unit = example.truth(), torch.finfo(dtype).eps
    for name, grad in floor_gradients(example).items():
        exact = truth.gradients[name]
        assert exact is not None
        error = float((grad - exact).norm() / exact.norm())
        assert unit / 16 < error < unit, name
    rounded = {name: grad.to(dtype) for name, grad in floor_gradients(example).items()}
    check_gradients(rounded, example, truth=truth)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("leaf", ["hidden", "weight", "bias", "lora_u0", "lora_b0"])
def test_a_gradient_that_is_off_is_seen(dtype: torch.dtype, leaf: str) -> None:
    example = random_example(60, vocab=200, dtype=dtype, lora=(3,), bias=True)
    got = example.reference()
    check_results(got, example)
    grad = got.gradients[leaf]
    assert grad is not None
    size = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-9}[dtype]
    with pytest.raises(AssertionError, match=f"d_{leaf}: L2 error"):
        check_gradients({**got.gradients, leaf: (grad.double() * (1 + size)).to(dtype)}, example)
    with pytest.raises(AssertionError, match=f"d_{leaf}: got torch"):
        check_gradients({**got.gradients, leaf: grad.to(torch.complex64)}, example)


def test_logits_rounded_to_bf16_are_seen() -> None:
    example = random_example(60, vocab=200, dtype=torch.bfloat16, std=5.0)
    z = (example.hidden @ example.head.weight.T).float()
    log_p = z.log_softmax(-1).gather(-1, example.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    got = logitless.TokenLogProbs(log_p.masked_fill(~example.live, 0.0), None)
    with pytest.raises(AssertionError, match="log_probs: .* tokens are off"):
        check_scores(got, example)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.1])
def test_a_score_that_is_off_is_seen(value: float) -> None:
    example = random_example(5, dtype=torch.float32)
    got = example.reference().scores
    with pytest.raises(AssertionError, match="log_probs: 1 tokens are off; the first, 2"):
        check_scores(replace(got, log_probs=got.log_probs.detach().index_fill(0, torch.tensor(2), value)), example)
    with pytest.raises(AssertionError, match="for an ignored token .* expected exactly 0"):
        check_scores(replace(got, log_probs=got.log_probs.detach().index_fill(0, torch.tensor(1), value)), example)


def test_a_divergence_below_zero_is_seen() -> None:
    case = random_divergence(9, dtype=torch.float64)
    case = replace(case, teacher=case.student)
    value, grads = case.truth()
    check_divergence((value, grads), case)
    with pytest.raises(pytest.fail.Exception, match="a divergence is negative"):
        check_divergence((value - 1e-16 * case.student.live, grads), case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_divergences_gradient_that_is_off_is_seen(dtype: torch.dtype) -> None:
    case = random_divergence(30, dtype=dtype)
    value, grads = case.truth()
    got = value.to(torch.promote_types(dtype, torch.float32))
    rounded = {name: None if grad is None else grad.to(dtype) for name, grad in grads.items()}
    check_divergence((got, rounded), case)
    size = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-9}[dtype]
    off = {name: None if grad is None else (grad * (1 + size)).to(dtype) for name, grad in grads.items()}
    with pytest.raises(pytest.fail.Exception, match="L2 error"):
        check_divergence((got, off), case)
