"""A head with everything, labels of which some are ignored, and a policy's loss, for the tests of the single pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless import LMHead, TokenLogProbs, losses

N, D, V, R = 61, 12, 97, 3
LossFn = Callable[[TokenLogProbs, Tensor], Tensor]


def make(dtype: torch.dtype = torch.float64, ignored: bool = True) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    labels = torch.randint(V - 5, (N,), generator=g)
    if ignored:
        labels[torch.rand(N, generator=g) < 0.4] = -100
    temperature = torch.rand(N, generator=g, dtype=torch.float64) + 0.5
    tensors = {"hidden": randn(N, D), "weight": randn(V, D), "bias": randn(V), "u": randn(N, R), "b": randn(V, R)}
    return tensors, labels, temperature


def head_of(tensors: dict[str, Tensor], **extra: Any) -> LMHead:
    lora = ((tensors["u"], tensors["b"]),)
    return LMHead(tensors["weight"], tensors["bias"], 0.8, 6.0, vocab_size=V - 5, lora=lora, **extra)


def policy(labels: Tensor) -> LossFn:
    g = torch.Generator().manual_seed(1)
    advantages = torch.randn(N, generator=g)
    old = torch.randn(N, generator=g) - 5
    count = int((labels != -100).sum())

    def loss_fn(scores: TokenLogProbs, index: Tensor) -> Tensor:
        assert scores.entropy is not None
        loss = losses.grpo(scores.log_probs, old[index], advantages[index], old[index] + 0.1, beta=0.1)
        return (loss + losses.entropy_bonus(scores.entropy, 0.05)) / count

    return loss_fn


def live(out: TokenLogProbs, labels: Tensor) -> tuple[TokenLogProbs, Tensor]:
    index = (labels != -100).nonzero().squeeze(1)
    assert out.entropy is not None
    return TokenLogProbs(out.log_probs[index], out.entropy[index]), index
