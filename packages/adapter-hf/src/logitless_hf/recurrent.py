"""Layers that carry a state from token to token, run on each sequence of a packed row by itself.

State-space layers, linear attention and short convolutions know nothing of restarting positions, and what tells them
the borders (`cu_seqlens`, `seq_idx`) exists in some families' GPU kernels only. A module of the text model that owns
an `nn.Conv1d`, or a decay by one of the usual names, is taken for one of them; whether that suffices is tried out.

Shape suffixes: B sequences, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from logitless.errors import UnsupportedError

__all__ = ["by_sequence", "recurrent_layers", "text_model"]

DECAYS = {"A_log", "slope_rate"}


def text_model(model: nn.Module) -> nn.Module:
    """The module that owns the token embeddings: a vision or audio tower lies beside it."""
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    return next((m for m in model.modules() if any(child is embeddings for child in m.children())), model)


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Those of the text model, none inside another."""
    found: list[nn.Module] = []
    for module in text_model(model).modules():
        owns = any(isinstance(child, nn.Conv1d) for child in module.children())
        owns = owns or not DECAYS.isdisjoint(module._parameters.keys() | module._buffers.keys())
        if owns and not any(module in set(outer.modules()) for outer in found):
            found.append(module)
    return found


def _cut(value: Any, lengths: Sequence[int]) -> list[Any]:
    """One for each sequence: parts of what has the row's tokens in its second axis, else the value itself."""
    if isinstance(value, (tuple, list)):
        parts = [_cut(item, lengths) for item in value]
        return [type(value)(part) for part in zip(*parts, strict=True)] if parts else [value] * len(lengths)
    if not isinstance(value, Tensor):
        return [value] * len(lengths)
    if value.ndim > 1 and value.shape[:2] == (1, sum(lengths)):
        return list(torch.split(value, list(lengths), dim=1))
    if value.dtype == torch.int64 and value.shape == (1 + len(lengths), 1, 1, 1):  # packed attention's mask
        return [None] * len(lengths)
    return [value] * len(lengths)


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(_joined(list(items)) for items in zip(*parts, strict=True))
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim=1)
    if all(part is None for part in parts):
        return None
    raise UnsupportedError(f"packed sequences: a recurrent layer returned {type(parts[0]).__qualname__}")


def by_sequence(own: Callable[..., Any], lengths: Sequence[int]) -> Callable[..., Any]:
    """A layer's forward over [1, T, ...], in turn over each sequence of such lengths, from an empty state."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        cut_args = [_cut(value, lengths) for value in args]
        cut_kwargs = {name: _cut(value, lengths) for name, value in kwargs.items()}
        return _joined(
            [
                own(*(parts[i] for parts in cut_args), **{name: parts[i] for name, parts in cut_kwargs.items()})
                for i in range(len(lengths))
            ]
        )

    return forward
