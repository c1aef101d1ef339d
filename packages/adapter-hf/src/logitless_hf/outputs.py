"""What a bound model returns: transformers' causal-LM output with scores in place of logits."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, make_dataclass
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from logitless.errors import UnsupportedError

__all__ = ["CausalLMOutputForPPO", "scored_output"]


@dataclass
class CausalLMOutputForPPO(CausalLMOutputWithPast):  # type: ignore[misc]
    """The family's own output, without logits, and with scores.

    Attributes:
        log_probs: [batch, sequence] nats; at position t that of its label (the next token); 0.0 where ignored.
        entropy: the same shape, nats; None if it was not asked for.
        values: None; for value models.
        aux_loss: the router's loss, where the family returns one.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    aux_loss: Tensor | None = None

    if "cache" in {field.name for field in fields(CausalLMOutputWithPast)}:  # renamed in transformers 5.24

        @property
        def past_key_values(self) -> Any:
            """The same as `cache`."""
            return self.cache

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (tuple(field.name for field in fields(self)), dict(self))


_OWN = tuple(field.name for field in fields(CausalLMOutputForPPO))


@functools.cache
def _with_fields(names: tuple[str, ...]) -> type[CausalLMOutputForPPO]:
    """The class that also has these fields; transformers' outputs flatten and pickle by their declared fields."""
    extra = [(name, Any, None) for name in names if name not in _OWN]
    if not extra:
        return CausalLMOutputForPPO
    cls = make_dataclass(CausalLMOutputForPPO.__name__, extra, bases=(CausalLMOutputForPPO,))
    cls.__module__, cls.__doc__ = CausalLMOutputForPPO.__module__, CausalLMOutputForPPO.__doc__
    return cls


def _rebuild(names: tuple[str, ...], values: dict[str, Any]) -> CausalLMOutputForPPO:
    return _with_fields(names)(**values)


def scored_output(family: Any, log_probs: Tensor, entropy: Tensor | None) -> CausalLMOutputForPPO:
    """The family's output with scores in place of its (empty) logits."""
    if not isinstance(family, ModelOutput):
        raise UnsupportedError(f"the model returned a {type(family).__qualname__}, expected a ModelOutput")
    kept = {name: value for name, value in family.items() if name not in ("loss", "logits")}
    return _with_fields(tuple(kept))(**kept, log_probs=log_probs, entropy=entropy)
