"""What a bound Megatron model returns in place of logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["CausalLMOutputForPPO"]


@dataclass(slots=True)
class CausalLMOutputForPPO:
    """Scores of this rank's packed tokens, in batch order; satisfies `logitless.CausalLMOutputForPPO`.

    Attributes:
        log_probs: [T] nats, or [T, K] of labels of that shape; 0.0 where one is ignored. None for a value model.
        entropy: [T] nats; None if it was not asked for.
        values: [T], of a value model.
        loss: what the call's `loss_fn` gave, summed; None without one.
        logits, past_key_values, hidden_states, attentions: None.
        aux_loss: how evenly the tokens went to the experts, as transformers reports it: of all layers, `top_k` at best,
            the coefficient not in it. Detached, for a log: Megatron adds the gradients of its balancing losses by
            itself. None where one of its routers computes none (in eval mode, without gradients, and where its
            activations are recomputed), and with pipeline stages, each of which sees only its own layers.
        stats: the statistics that were asked for, by name; None if none were.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    loss: Tensor | None = None
    logits: Any = None
    past_key_values: Any = None
    hidden_states: Any = None
    attentions: Any = None
    aux_loss: Tensor | None = None
    stats: Mapping[str, Tensor] | None = None
