"""Exact per-token log-probabilities and entropies from hidden states, without ever holding the logits."""

from importlib.metadata import version

from logitless import errors, losses, mismatch, reference
from logitless._registry import PluginStatus, adapters, backends, make_forward, use_backend
from logitless.best import top_k_log_probs
from logitless.head import LMHead
from logitless.kl import linear_kl
from logitless.linear import linear_log_probs
from logitless.packing import PackedBatch
from logitless.policy import linear_policy_loss
from logitless.types import (
    PROTOCOL,
    Adapter,
    Backend,
    CausalLMOutputForPPO,
    ForwardFn,
    Request,
    TokenLogProbs,
)

__version__ = version("logitless")

__all__ = [
    "PROTOCOL",
    "Adapter",
    "Backend",
    "CausalLMOutputForPPO",
    "ForwardFn",
    "LMHead",
    "PackedBatch",
    "PluginStatus",
    "Request",
    "TokenLogProbs",
    "adapters",
    "backends",
    "errors",
    "linear_kl",
    "linear_log_probs",
    "linear_policy_loss",
    "losses",
    "make_forward",
    "mismatch",
    "reference",
    "top_k_log_probs",
    "use_backend",
]
