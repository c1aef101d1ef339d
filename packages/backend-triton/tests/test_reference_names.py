"""The reference design's name: its shapes, its reductions, its gradients."""

from __future__ import annotations

import pytest
import torch

from logitless.errors import InvalidInputError
from logitless.testing.example import random_example
from logitless.testing.tolerance import check_results
from logitless_triton import linear_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_equals_the_op(reduction: str) -> None:
    example = random_example((2, 5), dtype=torch.float32, device=DEVICE, ignored=False, temperature=0.7)
    fresh = example.fresh()
    got, entropy = linear_cross_entropy(fresh.hidden, fresh.head.weight, fresh.labels, 0.7, reduction)
    want = example.score(backend="triton")
    expected = want.log_probs.flatten()
    expected = {"none": expected, "sum": expected.sum(), "mean": expected.mean()}[reduction]
    torch.testing.assert_close(got.detach(), expected)
    assert torch.equal(entropy.detach(), want.entropy.flatten())
    assert entropy.shape == (10,)


def test_gradients() -> None:
    from logitless.testing.example import Results
    from logitless.types import TokenLogProbs

    example = random_example((2, 5), dtype=torch.float32, device=DEVICE, ignored=False)
    fresh = example.fresh()
    log_probs, entropy = linear_cross_entropy(fresh.hidden, fresh.head.weight, fresh.labels)
    scores = TokenLogProbs(log_probs.view(2, 5), entropy.view(2, 5))
    check_results(Results(scores, fresh.pull(scores)), example)


def test_unknown_reduction() -> None:
    x = torch.zeros(2, 2, device=DEVICE)
    with pytest.raises(InvalidInputError, match="reduction: got 'avg'"):
        linear_cross_entropy(x, x, torch.zeros(2, dtype=torch.int64, device=DEVICE), reduction="avg")
