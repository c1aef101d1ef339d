"""The specification: pure torch, unchunked, with the logits in full. Every backend equals it.

Shape suffixes: N tokens, D hidden size, V vocab rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from logitless.head import LMHead
from logitless.types import TokenLogProbs

__all__ = [
    "head_logits",
    "keep",
    "linear_kl",
    "linear_log_probs",
    "raw_logits",
    "scores_of",
    "tempered",
    "top_k_log_probs",
]


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


def keep(logits: Tensor, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """[..., V] bool: the tokens that a sampler keeps; a set of all those whose logit is at least a threshold.

    `top_k`: a token with fewer than k of larger logit. `top_p`: of the softmax over those, a token with less than p in
    the tokens of larger logit. Tokens of equal logit are kept or dropped together.
    """
    kept = torch.ones_like(logits, dtype=torch.bool)
    if top_k is not None:
        kept = logits >= logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
    if top_p is not None and top_p < 1.0:  # 1 keeps every token, and rounded sums reach it sooner
        p, order = logits.masked_fill(~kept, float("-inf")).softmax(-1).sort(-1, descending=True)
        z = logits.gather(-1, order)
        last = ((p.cumsum(-1) - p < top_p).sum(-1, keepdim=True) - 1).clamp(min=0)
        kept = kept & (logits >= z.gather(-1, last))
    return kept


def scores_of(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    stats: Sequence[str] = (),
) -> TokenLogProbs:
    """`log_softmax(z).gather(labels)` and `-Σ p log p` of logits [..., V], in nats; 0.0 where ignored.

    Labels are [...] or [..., K]. With `top_k` or `top_p`, z is `-inf` at tokens that are not kept; of a label that is
    not, the log-prob is that which it has when it alone is added to them.
    """
    labels_NK = labels.unsqueeze(-1) if labels.ndim < logits.ndim else labels
    each = labels_NK != ignore_index
    live = each.any(-1)
    z, label_nK = logits[live], labels_NK[live].where(each[live], 0).long()
    kept = keep(z.detach(), top_k, top_p)
    log_p = z.masked_fill(~kept, float("-inf")).log_softmax(-1)
    label_kept = kept.gather(-1, label_nK)
    lse, own = z.masked_fill(~kept, float("-inf")).logsumexp(-1, keepdim=True), z.gather(-1, label_nK)
    log_prob = torch.where(label_kept, log_p.gather(-1, label_nK), own - torch.logaddexp(lse, own))
    plogp = log_p.exp() * log_p.masked_fill(log_p == float("-inf"), 0.0)  # 0·log 0 = 0, not NaN
    zeros = log_p.new_zeros(live.shape)
    found = {
        "sum_sq_probs": log_p.exp().square().sum(-1),
        "mean_logit": z.mean(-1),
        "is_argmax": own == z.amax(-1, keepdim=True),
        "is_kept": label_kept,
    }

    def whole(value: Tensor) -> Tensor:
        if value.ndim == 1:
            return zeros.to(value.dtype).masked_scatter(live, value)
        blank = torch.zeros(labels.shape, dtype=value.dtype, device=value.device)
        return blank.masked_scatter(each.view(labels.shape), value[each[live]])

    return TokenLogProbs(
        whole(log_prob), whole(-plogp.sum(-1)), {name: whole(found[name]).detach() for name in stats} or None
    )


def linear_log_probs(
    hidden: Tensor,
    head: LMHead,
    labels: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    ignore_index: int = -100,
    top_k: int | None = None,
    top_p: float | None = None,
    stats: Sequence[str] = (),
) -> TokenLogProbs:
    """`scores_of(head_logits(hidden, head, temperature), labels, ...)`."""
    logits = head_logits(hidden, head, temperature)[..., : head.vocab_size]
    return scores_of(logits, labels, ignore_index, top_k=top_k, top_p=top_p, stats=stats)


def top_k_log_probs(
    hidden: Tensor, head: LMHead, k: int, *, temperature: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """The k largest of `log_softmax(z)`, ids and values [..., k], largest first; of equal ones the lowest id first."""
    logits = head_logits(hidden, head, temperature)
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return ids, logits.log_softmax(-1).gather(-1, ids)


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
