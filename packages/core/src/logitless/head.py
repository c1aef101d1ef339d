"""The language-model head: everything that stands between the last hidden state and the distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["LMHead"]


@dataclass(frozen=True, slots=True)
class LMHead:
    """The whole head of a model: `z = c·tanh(s·(h·Wᵀ + b + Σ u·Bᵀ)/c)`.

    Attributes:
        weight: [V, D], this rank's vocab rows.
        bias: [V].
        scale: s, multiplies the logits; at most 1000 either way.
        softcap: c, from 1e-5 to 1000; None for no cap.
        vocab_size: real vocab rows over all ranks; rows at and beyond it are padding. None: all rows are real.
        vocab_start: global id of this rank's row 0. None: equal contiguous shards.
        lora: pairs (u [..., r], b [V, r]), where `u = s·A(dropout(h))` was made outside, by autograd.
        grad_buffer: float32 [V, D] into which d_weight is added in place of returning it (Megatron's `main_grad`).
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None
    vocab_start: int | None = None
    lora: Sequence[tuple[Tensor, Tensor]] = ()
    grad_buffer: Tensor | None = None
