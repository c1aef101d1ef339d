"""The plugin that core finds by entry point; Megatron is imported when a model of it is bound, not before."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from logitless import ForwardFn
from logitless.errors import InvalidInputError
from logitless_mcore.registry import ARCHITECTURES

__all__ = ["McoreAdapter"]


class McoreAdapter:
    """Megatron-Core language models, wrapped or not, on any pipeline stage."""

    name = "mcore"
    protocol = 1  # what this was written for; core's own number would agree with any core

    def supports(self, model: Any) -> str | None:
        """None for a module that holds a Megatron language model, else why not."""
        if not isinstance(model, nn.Module):
            return f"got a {type(model).__qualname__}, expected a Megatron-Core model"
        if "megatron.core" not in sys.modules:  # then no model of it exists, and importing it takes seconds
            return f"{type(model).__qualname__} is no Megatron-Core model: megatron.core is not imported"
        from megatron.core.models.common.language_module.language_module import LanguageModule

        from logitless_mcore.capture import language_model

        inner = language_model(model)
        if not isinstance(inner, LanguageModule):
            return f"{type(inner).__qualname__} is no Megatron-Core LanguageModule, nor has one as its language_model"
        return None

    def make_forward(self, model: Any, layout: str, backend: str | None) -> ForwardFn:
        """See `logitless_mcore.make_forward`."""
        from logitless_mcore.bound import make_forward

        return make_forward(model, layout, backend)

    def inspect(self, path: str) -> Mapping[str, Any]:
        """Whether a Hugging Face checkpoint's architecture is one that `get_mcore_forward_fn` and its like know.

        Raises:
            InvalidInputError: the folder holds no config.json, or one that is no JSON.
        """
        from logitless_mcore.hf_source import read_json

        config = Path(path) / "config.json"
        if not config.is_file():
            raise InvalidInputError(f"{path}: expected a local folder with a config.json")
        named = read_json(config).get("architectures") or [None]
        known = named[0] in ARCHITECTURES
        reason = None if known else f"expected one of {', '.join(ARCHITECTURES)}"
        return {"architecture": named[0], "understood": known, "reason": reason}
