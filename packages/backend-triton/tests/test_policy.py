"""The single pass' loss and scores, where no gradient is wanted and where a loss writes into what it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from logitless import TokenLogProbs, linear_policy_loss
from logitless.testing.example import random_example

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("options", [{}, {"top_k": 3}], ids=["plain", "kept-set"])
def test_without_gradients(options: dict[str, Any]) -> None:
    example = random_example(9, vocab=40, hidden_size=16, dtype=torch.float32, device=DEVICE).fresh()
    weights = torch.linspace(0.5, 2.0, 9, device=DEVICE)

    def loss_fn(scores: TokenLogProbs, index: torch.Tensor) -> torch.Tensor:
        return weights[index] * scores.log_probs

    with torch.no_grad():
        loss, scores = linear_policy_loss(
            example.hidden, example.head, example.labels, loss_fn, backend="triton", **options
        )
    want = example.score(backend="triton", **options)
    assert not loss.requires_grad
    torch.testing.assert_close(scores.log_probs, want.log_probs)
    torch.testing.assert_close(scores.entropy, want.entropy)
    torch.testing.assert_close(loss, (weights * want.log_probs).sum())


def test_what_a_loss_writes_into_its_scores_stays_there() -> None:
    example = random_example(9, vocab=40, hidden_size=16, dtype=torch.float32, device=DEVICE)
    with torch.no_grad():
        inputs = (example.hidden, example.head, example.labels)
        _, scores = linear_policy_loss(*inputs, lambda scores, i: scores.log_probs.exp_(), backend="triton")
    assert torch.equal(scores.log_probs, example.score(backend="triton").log_probs)
