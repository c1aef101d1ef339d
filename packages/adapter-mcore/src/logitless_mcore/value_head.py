"""A value model's head: one number for each token, in the output layer's place."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from logitless_mcore.capture import is_last_stage, language_model

__all__ = ["ValueHead", "is_value_model", "to_value_model"]


class ValueHead(nn.Linear):
    """[s, b, D] hidden states to [s, b, 1] float32, whole on every tensor-parallel rank; called as an output layer is.

    Its weight is the same on every rank. Under sequence parallelism each rank computes its own tokens, and the gradient
    is summed over the ranks by Megatron's `finalize_model_grads`, which the weight is marked for.
    """

    def __init__(self, config: Any, tp_group: Any, device: torch.device | None = None) -> None:
        super().__init__(config.hidden_size, 1, bias=False, device=device, dtype=config.params_dtype)
        self.sequence_parallel = bool(config.sequence_parallel) and tp_group.size() > 1
        self.tp_group = tp_group
        nn.init.zeros_(self.weight)
        self.weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(  # type: ignore[override]
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """As Megatron calls its output layer; both keywords are of no use here."""
        values = nn.functional.linear(hidden, self.weight).float()
        if self.sequence_parallel:
            # Every rank goes on with the whole, alike, so each takes back its own tokens' gradient.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None


def to_value_model(model: Any) -> Any:
    """Replace the output layer of a Megatron model's last stage by a `ValueHead` of zeros; the same object comes back.

    Call it on every rank, before the model is wrapped. A tied model's embedding is tied no longer.
    """
    inner = language_model(model)
    inner.share_embeddings_and_output_weights = False
    if is_last_stage(model):
        old = inner.output_layer
        device = next(inner.parameters()).device
        inner.output_layer = ValueHead(inner.config, old.tp_group, device)
    return model


def is_value_model(model: Any) -> bool:
    """Whether the last stage gives one number for each token; a stage without an output layer cannot tell."""
    weight = getattr(getattr(language_model(model), "output_layer", None), "weight", None)
    return weight is not None and weight.shape[0] == 1
