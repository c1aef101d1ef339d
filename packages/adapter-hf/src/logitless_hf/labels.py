"""Which token each position scores: the next one of the same sequence, and nothing at a border.

Shape letters: B rows, S positions. All is done on the device; one value is read back where packed sequences may not
be kept apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from logitless.errors import InputTypeError, InvalidInputError

__all__ = ["IGNORE_INDEX", "next_token_labels"]

IGNORE_INDEX = -100
BY_HAND = "pass shift_labels, the token that each position predicts"


def _no_borders(name: str, value: Any, expected: object) -> InvalidInputError:
    got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__qualname__}"
    return InvalidInputError(f"{name}: got {got}, which tells no borders of sequences; expected {expected}; {BY_HAND}")


def _same_by_mask(mask: Any, shape: tuple[int, int]) -> Tensor:
    """[B, S-1], whether t and t+1 are both attended to."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] != shape[0] or mask.shape[1] < shape[1]:
        raise _no_borders("attention_mask", mask, shape)
    live = mask[:, mask.shape[1] - shape[1] :]  # with a cache, the mask also covers what is in it
    return (live[:, :-1] != 0) & (live[:, 1:] == live[:, :-1])


def _same_by_position(position_ids: Any, shape: tuple[int, int]) -> Tensor:
    """[B or 1, S-1], whether the position goes up from t to t+1."""
    ids = position_ids
    if isinstance(ids, Tensor) and ids.ndim == 3 and ids.shape[0] == 4:
        ids = ids[0]  # Qwen-VL's rows: text, then time, height and width
    if isinstance(ids, Tensor) and ids.ndim == 1:
        ids = ids.unsqueeze(0)
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[0] not in (1, shape[0]) or ids.shape[1] != shape[1]:
        raise _no_borders("position_ids", position_ids, shape)
    return ids[:, 1:] > ids[:, :-1]


def _same_by_lengths(cu_seq_lens: Any, shape: tuple[int, int]) -> Tensor:
    """[B, S-1], whether t and t+1 lie in the same sequence; what lies beyond the last one is in none."""
    if not isinstance(cu_seq_lens, Tensor) or cu_seq_lens.ndim != 1 or cu_seq_lens.numel() < 1:
        raise _no_borders("cu_seq_lens", cu_seq_lens, "a 1-D tensor")
    at = torch.arange(shape[0] * shape[1], device=cu_seq_lens.device)
    sequence = torch.searchsorted(cu_seq_lens.to(at.dtype), at, right=True).view(shape)
    inside = (at < cu_seq_lens[-1]).view(shape)
    return (sequence[:, 1:] == sequence[:, :-1]) & inside[:, 1:]


def _check_kept_apart(goes_up: Tensor, call: Mapping[str, Any], shape: tuple[int, int]) -> None:
    """Refuse a row of several sequences that transformers' attention would mix.

    It tells them apart by positions that restart, but not if it is given a mask or fills a cache.
    """
    mask, cache = call.get("attention_mask"), call.get("use_cache")
    if (mask is None and not cache) or torch.compiler.is_compiling():
        return
    restarts = ~goes_up if mask is None else ~goes_up & _same_by_mask(mask, shape).to(goes_up.device)
    if bool(restarts.any()):
        given = "attention_mask" if mask is not None else "use_cache=True"
        raise InvalidInputError(
            f"{given}: given with position_ids that restart within a row, so transformers' attention would mix the "
            "packed sequences; leave it out, or use logitless.make_forward"
        )


def next_token_labels(tokens: Tensor, call: Mapping[str, Any]) -> Tensor:
    """Labels [B, S] or [B, S, K] int64: at t those at t+1, or IGNORE_INDEX where none of the same sequence follows.

    A border is where `attention_mask` is 0 (or changes), `position_ids` do not go up, or `cu_seq_lens` say so.

    Args:
        tokens: [B, S], `labels` or `input_ids`, or K tokens to score at each place, [B, S, K]; not shifted.
        call: what the model was called with, by name.

    Raises:
        InputTypeError: the tokens are not integers; in 16 bits, ids beyond 256 or 2048 would be rounded.
        InvalidInputError: the borders cannot be told, or the call would mix packed sequences.
    """
    if not isinstance(tokens, Tensor) or tokens.ndim not in (2, 3):
        raise _no_borders("labels", tokens, "[batch, sequence] or [batch, sequence, K]")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise InputTypeError(f"labels: got dtype {tokens.dtype}, expected token ids, integers such as int64")
    shape = (tokens.shape[0], tokens.shape[1])
    shifted = torch.full_like(tokens, IGNORE_INDEX, dtype=torch.int64)
    if shape[1] < 2:
        return shifted
    borders = (
        ("attention_mask", _same_by_mask),
        ("position_ids", _same_by_position),
        ("cu_seq_lens_q", _same_by_lengths),
        ("cu_seq_lens", _same_by_lengths),
    )
    same: Tensor | None = None
    for name, rule in borders:
        if call.get(name) is not None:
            found = rule(call[name], shape).to(tokens.device)
            if name == "position_ids":
                _check_kept_apart(found, call, shape)
            same = found if same is None else same & found
    following = tokens[:, 1:].long()
    if same is not None:
        following = following.masked_fill(~(same if tokens.ndim == 2 else same.unsqueeze(-1)), IGNORE_INDEX)
    shifted[:, :-1] = following
    return shifted
