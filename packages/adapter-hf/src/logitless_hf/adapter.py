"""The plugin that core finds by entry point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from logitless import ForwardFn
from logitless_hf.binding import inspect_head
from logitless_hf.forward import make_forward
from logitless_hf.score.checkpoint import Checkpoint

__all__ = ["HFAdapter"]


class HFAdapter:
    """Hugging Face causal language models, PEFT's included."""

    name = "hf"
    protocol = 1  # what this was written for; core's own number would agree with any core

    def supports(self, model: Any) -> str | None:
        """None for a module that names its head as transformers' models do, else why not."""
        if not isinstance(model, nn.Module):
            return f"got a {type(model).__qualname__}, expected a transformers model"
        if not hasattr(model, "get_output_embeddings") and not hasattr(model, "get_base_model"):
            inner = next((name for name in ("module", "_orig_mod") if name in model._modules), None)
            if inner is not None:
                return (
                    f"{type(model).__qualname__} wraps a model; pass its .{inner}. DDP does not "
                    "average the gradients of a forward that runs past it: call a bound model's wrapper, or use FSDP2"
                )
            return f"{type(model).__qualname__} has no get_output_embeddings(), as transformers' models have"
        return None

    def make_forward(self, model: Any, layout: str, backend: str | None) -> ForwardFn:
        """See `logitless_hf.forward.make_forward`."""
        return make_forward(model, layout, backend)

    def inspect(self, path: str) -> Mapping[str, Any]:
        """The verdict on a checkpoint's head, as names and values to print; loads the checkpoint, from a local folder.

        Raises:
            InvalidInputError: the folder is not there, or the checkpoint cannot be loaded whole.
        """
        report = inspect_head(Checkpoint(Path(path)).load(None, torch.device("cpu")))
        verdict = {field.name: getattr(report, field.name) for field in fields(report)}
        verdict["dtype"] = None if report.dtype is None else str(report.dtype).removeprefix("torch.")
        verdict["understood"] = report.reason is None
        return verdict
