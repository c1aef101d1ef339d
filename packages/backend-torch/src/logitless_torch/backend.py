"""The plugin that core finds: plain functions behind the `Backend` protocol."""

from __future__ import annotations

import torch

from logitless.types import Request
from logitless_torch.backward import backward
from logitless_torch.best import top_k_log_probs
from logitless_torch.forward import forward
from logitless_torch.kl import kl_backward, kl_forward
from logitless_torch.policy import policy_loss

__all__ = ["TorchBackend"]


class TorchBackend:
    """Equals `logitless.reference` on every device that PyTorch runs on, in tiles bounded by `workspace_bytes`."""

    name = "torch"
    priority = 0
    protocol = 1
    features = frozenset({"kept_set", "several_labels", "stats", "top_k_log_probs"})

    def supports(self, request: Request) -> str | None:
        """None: every request of this protocol can be served."""
        return None

    def kept_shape(self, request: Request, keep_bytes: int) -> tuple[int, ...]:
        """Room for the fp32 (fp64) logits of as many tiles as `keep_bytes` allows; none with a kept set."""
        if request.kept_set:
            return (0,)
        return (_whole_logits(request, keep_bytes),)

    def kl_kept_shape(self, request: Request, keep_bytes: int) -> tuple[int, ...]:
        """Room for the logits of both heads, as `kept_shape`."""
        return (2 * _whole_logits(request, keep_bytes // 2),)

    forward = staticmethod(forward)
    backward = staticmethod(backward)
    policy_loss = staticmethod(policy_loss)
    top_k_log_probs = staticmethod(top_k_log_probs)
    kl_forward = staticmethod(kl_forward)
    kl_backward = staticmethod(kl_backward)


def _whole_logits(request: Request, allowed: int) -> int:
    """Bytes of as many of a head's logits as may be kept; not cut further, since one too few would lose a tile."""
    size = 8 if torch.float64 in (request.hidden_dtype, request.weight_dtype) else 4
    return min(allowed // size, request.n_tokens * request.vocab_rows) * size
