"""The two ways to an op's backward: through the dispatcher, where something looks on, and past it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from logitless import linear_kl, linear_log_probs, reference
from logitless.head import LMHead
from logitless.testing.memory import MemoryTracker

pytestmark = pytest.mark.usefixtures("reference_backend")

WAYS: dict[str, Callable[[], Any]] = {"plain": nullcontext, "dispatched": MemoryTracker}
each_way = pytest.mark.parametrize("way", WAYS)
LABELS = torch.tensor([3, 0, -100, 6])


def leaves() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    return hidden.requires_grad_(), weight.requires_grad_()


class GivesNone(Function):
    """An identity that has no gradient for its input: autograd then calls what is upstream with None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


@each_way
@pytest.mark.parametrize("output", ["log_probs", "entropy"])
def test_one_output_alone_is_differentiated(way: str, output: str) -> None:
    upstream = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with WAYS[way]():
        inputs = leaves()
        got = torch.autograd.grad(getattr(linear_log_probs(*inputs, LABELS), output), inputs, upstream)
    hidden, weight = leaves()
    out = reference.linear_log_probs(hidden, LMHead(weight), LABELS)
    torch.testing.assert_close(got, torch.autograd.grad(getattr(out, output), (hidden, weight), upstream))


@each_way
def test_what_is_given_no_gradient_gives_none(way: str) -> None:
    with WAYS[way]():
        hidden, weight = leaves()
        out = linear_log_probs(hidden, weight, LABELS)
        assert out.entropy is not None
        (GivesNone.apply(out.log_probs).sum() + GivesNone.apply(out.entropy).sum()).backward()
    assert hidden.grad is None
    assert weight.grad is None


@each_way
def test_a_divergence_that_is_given_no_gradient_gives_none(way: str) -> None:
    with WAYS[way]():
        hidden, weight = leaves()
        value = linear_kl(hidden, weight, hidden.detach() + 1.0, weight.detach())
        GivesNone.apply(value).sum().backward()
    assert hidden.grad is None
    assert weight.grad is None
