"""`FusedLinearForPPO`: the reference design's signature and shapes, the op's values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from logitless import LMHead, reference
from logitless.errors import InputTypeError, InvalidInputError
from logitless.testing import MemoryTracker
from logitless_torch import FusedLinearForPPO

D, V = 6, 37


def make(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, D, generator=noise, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, generator=noise, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, shape, generator=noise)


@pytest.mark.parametrize("upstream", ["both", "log_probs", "entropy"])
@pytest.mark.parametrize("shape", [(11,), (2, 5)], ids=str)
def test_equals_the_reference(shape: tuple[int, ...], upstream: str) -> None:
    hidden, weight, ids = make(*shape)
    found = FusedLinearForPPO(chunk_size=3)(hidden, weight, ids, temperature=0.7)
    truth = reference.linear_log_probs(hidden, LMHead(weight), ids, temperature=0.7)
    places = {"both": [0, 1], "log_probs": [0], "entropy": [1]}[upstream]
    pairs = [(found[i], (truth.log_probs, truth.entropy)[i]) for i in places]
    for got, want in pairs:
        assert got.shape == ids.shape
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    gradients = torch.randn(2, *shape, dtype=torch.float64)[places].unbind()
    mine, theirs = (torch.autograd.grad([pair[i] for pair in pairs], (hidden, weight), gradients) for i in (0, 1))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_half_precision_comes_in_float32() -> None:
    hidden, weight, ids = make(4, dtype=torch.bfloat16)
    assert {x.dtype for x in FusedLinearForPPO()(hidden, weight, ids)} == {torch.float32}


def test_a_chunk_bounds_the_memory() -> None:
    hidden, weight, ids = make(4096)
    peaks = []
    for chunk_size in (64, 4096):
        with MemoryTracker() as tracker, torch.no_grad():
            FusedLinearForPPO(chunk_size)(hidden, weight, ids)
        peaks.append(tracker.peak_bytes)
    assert peaks[0] < peaks[1] / 2


@pytest.mark.parametrize(
    ("chunk_size", "error"),
    [(0, InvalidInputError), (-4, InvalidInputError), (2.0, InputTypeError), (True, InputTypeError)],
)
def test_wrong_chunk_size(chunk_size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="chunk_size: got"):
        FusedLinearForPPO(chunk_size)


@pytest.mark.parametrize("weight", [None, torch.tensor(1.0), torch.ones(D)], ids=["none", "number", "row"])
def test_weights_that_are_no_matrix_are_named(weight: Any) -> None:
    hidden, _, ids = make(3)
    with pytest.raises((InputTypeError, InvalidInputError), match="^head"):
        FusedLinearForPPO()(hidden, weight, ids)
