"""Value models: a critic's value of each token, through the same calls as scores.

What transformers calls token classification with one label (`AutoModelForTokenClassification`, `num_labels=1`) has one
number for each token where a language model has logits. There is no vocabulary, so its own forward is all there is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from logitless.errors import UnsupportedError
from logitless_hf.outputs import CausalLMOutputForPPO, scored_output

__all__ = ["is_value_model", "valued_output"]


def is_value_model(model: Any) -> bool:
    """Whether the model has no vocabulary's head and one label; its first call shows whether that is per token."""
    try:
        head = model.get_output_embeddings()
    except Exception:  # a model that has none may raise what it likes
        head = None
    return head is None and getattr(getattr(model, "config", None), "num_labels", None) == 1


def valued_output(model: nn.Module, family: Any, shape: tuple[int, ...]) -> CausalLMOutputForPPO:
    """The family's output with `values` in the given shape, that of the input ids.

    Raises:
        UnsupportedError: it does not have one number for each token.
    """
    logits = getattr(family, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape != (*shape, 1):
        got = f"logits of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else "no logits"
        raise UnsupportedError(
            f"{type(model).__qualname__}: gives {got}, expected {(*shape, 1)}, a value for each token; load a "
            "critic with AutoModelForTokenClassification and num_labels=1"
        )
    return scored_output(family, None, None, values=logits.squeeze(-1))
