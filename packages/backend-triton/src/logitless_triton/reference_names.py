"""`linear_cross_entropy`, under the name and with the signature of the design that this project replaces."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from logitless import linear_log_probs
from logitless.errors import InvalidInputError

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of labels, each [B·S] float32 in nats; `logitless.linear_log_probs` has it all.

    Args:
        hidden: [..., D].
        weight: [V, D]; with a group, this rank's rows of V·size, in rank order.
        labels: [...] global ids, already shifted.
        reduction: "none", "sum" or "mean", of the log-probabilities.
        dist_process_group: ranks that share the vocabulary; every one gets the whole d_hidden.

    Raises:
        InvalidInputError: an unknown reduction, and all that `linear_log_probs` raises.
    """
    if reduction not in ("none", "sum", "mean"):
        raise InvalidInputError(f"reduction: got {reduction!r}, expected 'none', 'sum' or 'mean'")
    out = linear_log_probs(
        hidden, weight, labels, temperature=temperature, tp_group=dist_process_group, backend="triton"
    )
    log_probs, entropy = out.log_probs.flatten(), out.entropy
    assert entropy is not None
    if reduction != "none":
        log_probs = log_probs.sum() if reduction == "sum" else log_probs.mean()
    return log_probs, entropy.flatten()
