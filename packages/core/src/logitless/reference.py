"""The specification: pure torch, unchunked, with the logits in full. Every backend equals it.

Shape suffixes: N tokens, D hidden size, V vocab rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.head import LMHead
from logitless.types import TokenLogProbs

__all__ = ["head_logits", "linear_log_probs"]


def head_logits(hidden: Tensor, head: LMHead, temperature: Tensor | float = 1.0) -> Tensor:
    """Tempered logits [..., V] in float32 (float64 from float64), with `-inf` at padded vocab rows."""
    acc = torch.promote_types(torch.promote_types(hidden.dtype, head.weight.dtype), torch.float32)
    z = hidden.to(acc) @ head.weight.to(acc).T
    if head.bias is not None:
        z = z + head.bias.to(acc)
    for u, b in head.lora:
        z = z + u.to(acc) @ b.to(acc).T
    z = z * head.scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    z = z / (temperature.to(acc).unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    vocab_size = head.weight.shape[0] if head.vocab_size is None else head.vocab_size
    return z.masked_fill(torch.arange(z.shape[-1], device=z.device) >= vocab_size, float("-inf"))


def linear_log_probs(
    hidden: Tensor, head: LMHead, labels: Tensor, *, temperature: Tensor | float = 1.0, ignore_index: int = -100
) -> TokenLogProbs:
    """`log_softmax(z).gather(labels)` and `-Σ p log p`, in nats; 0.0 where the label is `ignore_index`."""
    live = labels != ignore_index
    log_p = head_logits(hidden, head, temperature)[live].log_softmax(-1)
    log_prob = log_p.gather(-1, labels[live].long().unsqueeze(-1)).squeeze(-1)
    plogp = log_p.exp() * log_p.masked_fill(log_p == float("-inf"), 0.0)  # 0·log 0 = 0, not NaN
    zeros = log_p.new_zeros(labels.shape)
    return TokenLogProbs(zeros.masked_scatter(live, log_prob), zeros.masked_scatter(live, -plogp.sum(-1)))
