"""The plugin that core finds by entry point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM

from logitless import PROTOCOL, ForwardFn
from logitless.errors import InvalidInputError
from logitless_hf.binding import inspect_head
from logitless_hf.forward import make_forward

__all__ = ["HFAdapter"]


class HFAdapter:
    """Hugging Face causal language models, PEFT's included."""

    name = "hf"
    protocol = PROTOCOL

    def supports(self, model: Any) -> str | None:
        """None for a module that names its head as transformers' models do, else why not."""
        if not isinstance(model, nn.Module):
            return f"got a {type(model).__qualname__}, expected a transformers model"
        if not hasattr(model, "get_output_embeddings") and not hasattr(model, "get_base_model"):
            return f"{type(model).__qualname__} has no get_output_embeddings(), as transformers' models have"
        return None

    def make_forward(self, model: Any, layout: str, backend: str | None) -> ForwardFn:
        """See `logitless_hf.forward.make_forward`."""
        return make_forward(model, layout, backend)

    def inspect(self, path: str) -> Mapping[str, Any]:
        """The verdict on a checkpoint's head, as names and values to print; loads the checkpoint.

        Raises:
            InvalidInputError: the checkpoint cannot be loaded.
        """
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"model: {path} is not a causal language model that loads: {error}") from error
        report = inspect_head(model)
        verdict = {field.name: getattr(report, field.name) for field in fields(report)}
        verdict["dtype"] = None if report.dtype is None else str(report.dtype).removeprefix("torch.")
        verdict["understood"] = report.reason is None
        return verdict
