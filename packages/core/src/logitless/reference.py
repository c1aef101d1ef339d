"""The specification: pure torch, unchunked, with the logits in full. Every backend equals it.

Shape suffixes: N tokens, D hidden size, V vocab rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from logitless.head import LMHead
from logitless.types import TokenLogProbs

__all__ = ["head_logits", "linear_kl", "linear_log_probs", "raw_logits", "scores_of", "tempered"]


def raw_logits(hidden: Tensor, head: LMHead) -> Tensor:
    """`h·W + b + Σ u·B`, [..., V] in float32 (float64 from float64): before scale, softcap and temperature."""
    acc = torch.promote_types(torch.promote_types(hidden.dtype, head.weight.dtype), torch.float32)
    z = hidden.to(acc) @ head.weight.to(acc).T
    if head.bias is not None:
        z = z + head.bias.to(acc)
    for u, b in head.lora:
        z = z + u.to(acc) @ b.to(acc).T
    return z


def tempered(raw: Tensor, head: LMHead, temperature: Tensor | float = 1.0) -> Tensor:
    """Raw logits [..., V] after the head's scale and softcap and the temperature, `-inf` at padded vocab rows."""
    z = raw * head.scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    z = z / (temperature.to(z.dtype).unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    vocab_size = head.weight.shape[0] if head.vocab_size is None else head.vocab_size
    return z.masked_fill(torch.arange(z.shape[-1], device=z.device) >= vocab_size, float("-inf"))


def head_logits(hidden: Tensor, head: LMHead, temperature: Tensor | float = 1.0) -> Tensor:
    """Tempered logits [..., V] in float32 (float64 from float64), with `-inf` at padded vocab rows."""
    return tempered(raw_logits(hidden, head), head, temperature)


def scores_of(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> TokenLogProbs:
    """`log_softmax(z).gather(labels)` and `-Σ p log p` of logits [..., V], in nats; 0.0 where ignored."""
    live = labels != ignore_index
    log_p = logits[live].log_softmax(-1)
    log_prob = log_p.gather(-1, labels[live].long().unsqueeze(-1)).squeeze(-1)
    plogp = log_p.exp() * log_p.masked_fill(log_p == float("-inf"), 0.0)  # 0·log 0 = 0, not NaN
    zeros = log_p.new_zeros(labels.shape)
    return TokenLogProbs(zeros.masked_scatter(live, log_prob), zeros.masked_scatter(live, -plogp.sum(-1)))


def linear_log_probs(
    hidden: Tensor, head: LMHead, labels: Tensor, *, temperature: Tensor | float = 1.0, ignore_index: int = -100
) -> TokenLogProbs:
    """`scores_of(head_logits(hidden, head, temperature), labels, ignore_index)`."""
    return scores_of(head_logits(hidden, head, temperature), labels, ignore_index)


def linear_kl(
    hidden: Tensor,
    head: LMHead,
    ref_hidden: Tensor,
    ref_head: LMHead,
    *,
    direction: str = "forward",
    beta: float = 0.5,
    temperature: Tensor | float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """KL(reference‖student), its reverse, or their Jensen-Shannon divergence, [...] in nats; 0.0 where not `mask`."""
    live = torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device) if mask is None else mask
    log_p, log_q = (
        head_logits(h, w, temperature)[live][:, : w.vocab_size].log_softmax(-1)
        for h, w in ((hidden, head), (ref_hidden, ref_head))
    )
    if direction == "jsd":
        p, q = (x.clamp(min=-1e30) for x in (log_p, log_q))  # the mixture of two -inf has no gradient
        log_m = torch.logaddexp(q + math.log(beta), p + math.log1p(-beta))
        value = beta * _kl(log_q, log_m) + (1 - beta) * _kl(log_p, log_m)
    else:
        value = _kl(log_q, log_p) if direction == "forward" else _kl(log_p, log_q)
    return value.new_zeros(live.shape).masked_scatter(live, value)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """`Σ a·log(a/b)` over the last dimension, where 0·log(0/b) = 0."""
    a = log_a.exp()
    return (a * (log_a - log_b).masked_fill(a == 0, 0.0)).sum(-1)
