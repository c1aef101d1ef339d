"""How far a trainer's log-probs are from those of the rollout engine that sampled the tokens.

The engine and the trainer hold the same weights and yet score a token differently: other kernels, another precision,
another batch. The ratio of the two is then no longer 1 before the first update, and what is trained is off-policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from logitless.collectives import all_reduce, all_reduce_max
from logitless.errors import InputTypeError, InvalidInputError

__all__ = ["RATIO_INTERVAL", "Mismatch", "rollout_mismatch"]

RATIO_INTERVAL = (0.9, 1.1)
"""Ratios in this interval, ends included, are not counted as outside."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over tokens, so that micro-batches and files add up: `a + b` is the mismatch of both.

    With Δ = log_prob − rollout_log_prob in nats, and ratio = exp(Δ). All statistics of no tokens are 0.
    """

    tokens: int = 0
    sum_delta: float = 0.0
    sum_abs_delta: float = 0.0
    max_abs_delta: float = 0.0
    sum_k3: float = 0.0  # of ratio − 1 − Δ
    outside: int = 0  # ratios not in RATIO_INTERVAL

    @property
    def mean_delta(self) -> float:
        """Mean of Δ in nats; its negative is the unbiased estimate k1 of KL(rollout ‖ trainer)."""
        return self.sum_delta / max(self.tokens, 1)

    @property
    def mean_abs_delta(self) -> float:
        """Mean of |Δ| in nats."""
        return self.sum_abs_delta / max(self.tokens, 1)

    @property
    def kl(self) -> float:
        """KL(rollout ‖ trainer) per token in nats: mean of ratio − 1 − Δ, unbiased and never negative.

        The estimator k3 of Schulman 2020, "Approximating KL Divergence", for tokens that the rollout engine sampled.
        """
        return self.sum_k3 / max(self.tokens, 1)

    @property
    def share_outside(self) -> float:
        """Share of ratios outside `RATIO_INTERVAL`, 0 to 1."""
        return self.outside / max(self.tokens, 1)

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(
            self.tokens + other.tokens,
            self.sum_delta + other.sum_delta,
            self.sum_abs_delta + other.sum_abs_delta,
            max(self.max_abs_delta, other.max_abs_delta),
            self.sum_k3 + other.sum_k3,
            self.outside + other.outside,
        )

    def to_dict(self) -> Mapping[str, Any]:
        """The statistics by name, for a log or a JSON file; `kl` is None where it is too large for a float."""
        return {
            "tokens": self.tokens,
            "mean_delta": self.mean_delta,
            "mean_abs_delta": self.mean_abs_delta,
            "max_abs_delta": self.max_abs_delta,
            "kl": self.kl if math.isfinite(self.kl) else None,
            "ratio_interval": list(RATIO_INTERVAL),
            "share_outside": self.share_outside,
        }


@torch.no_grad()
def rollout_mismatch(
    log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor | None = None, *, group: Any = None
) -> Mismatch:
    """The mismatch of two sets of log-probs of the same tokens; one device-to-host copy.

    Both must be of the same distribution: an engine that reports log-probs from before the temperature is to be
    compared with the trainer's at temperature 1.

    Args:
        log_probs: the trainer's, of any shape, for the weights that sampled.
        rollout_log_probs: the engine's, in the same shape, as `PackedBatch.pack(x, of="token")` brings them.
        mask: the same shape, bool or 0/1: which tokens count, `batch.labels != -100` for a packed batch.
        group: a data-parallel torch.distributed group, to sum over.

    Raises:
        InputTypeError: not a float tensor.
        InvalidInputError: shapes differ, or a log-prob that counts is NaN or infinite.
    """
    for name, x in (("log_probs", log_probs), ("rollout_log_probs", rollout_log_probs)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__qualname__
            raise InputTypeError(f"{name}: got {got}, expected a float tensor")
    for name, other in (("rollout_log_probs", rollout_log_probs), ("mask", mask)):
        if other is not None and other.shape != log_probs.shape:
            raise InvalidInputError(f"{name}: got shape {tuple(other.shape)}, expected {tuple(log_probs.shape)}")
    delta = log_probs.double() - rollout_log_probs.to(log_probs.device).double()
    counts = torch.ones_like(delta) if mask is None else (mask != 0).to(delta)
    delta = delta.masked_fill(counts == 0, 0.0)  # what stands at other tokens, NaN too, is not looked at
    outside = (delta.exp() < RATIO_INTERVAL[0]) | (delta.exp() > RATIO_INTERVAL[1])
    sums = torch.stack(
        [counts.sum(), delta.sum(), delta.abs().sum(), (delta.expm1() - delta).sum(), outside.sum().double()]
    )
    largest = delta.abs().max() if delta.numel() else delta.new_zeros(())
    if group is not None:
        all_reduce(sums, group)
        all_reduce_max(largest, group)
    tokens, sum_delta, sum_abs, sum_k3, out, most = torch.cat([sums, largest.view(1)]).tolist()
    if not sum_abs < float("inf"):
        raise InvalidInputError(
            "log_probs, rollout_log_probs: got NaN or infinite values at tokens that count, expected finite log-probs; "
            "mask those tokens out"
        )
    return Mismatch(int(tokens), sum_delta, sum_abs, most, sum_k3, int(out))
