"""What the reference design's forwards are called with: types, shapes and devices; reads no tensor's values.

Shape suffixes: B sequences, S columns, j ragged, K of each place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless.errors import InputTypeError, InvalidInputError

__all__ = ["check_places", "check_rows"]


def check_rows(input_ids: Any, attention_mask: Any) -> None:
    """That ids are of padded rows [B, S], and the mask is theirs."""
    if not isinstance(input_ids, Tensor):
        raise InputTypeError(f"input_ids: got {_named(input_ids)}, expected a tensor [B, S] of integers")
    if input_ids.is_nested or input_ids.ndim != 2:
        raise InvalidInputError(
            f"input_ids: got {_shape(input_ids)}, expected a tensor [B, S] with its attention_mask; the functions "
            "named no_padding take nested tensors"
        )
    check_places("input_ids", input_ids, input_ids, integers=True)
    check_places("attention_mask", attention_mask, input_ids)


def check_places(
    name: str, x: Any, input_ids: Tensor, *, integers: bool = False, more: int | None = 0, coarser: bool = False
) -> None:
    """That an argument holds a value for each place of `input_ids`, in its layout and on its device.

    The lengths of a nested tensor are on its device: `Arrangement.pack` compares them, which reads them anyway.

    Args:
        name: the argument's.
        x: what was given for it.
        input_ids: [B, S], or nested [B, j].
        integers: whether only they will do, as for ids, of which a float would be cut off.
        more: how many dimensions may follow; None for any.
        coarser: whether one number for all, or one for each sequence, will do as well.
    """
    wanted = _wanted(input_ids, more, coarser)
    if not isinstance(x, Tensor):
        raise InputTypeError(f"{name}: got {_named(x)}, expected {wanted}")
    if integers and (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool):
        raise InputTypeError(f"{name}: got dtype {x.dtype}, expected integers; convert it with long() if it holds ids")
    if coarser and not x.is_nested and (x.ndim == 0 or x.shape == input_ids.shape[:1]):
        fits = True
    elif x.layout != input_ids.layout or x.is_nested != input_ids.is_nested:
        fits = False
    else:
        leading = 1 if input_ids.is_nested else 2
        fits = x.shape[:leading] == input_ids.shape[:leading] and 2 <= x.ndim <= (x.ndim if more is None else 2 + more)
    if not fits:
        raise InvalidInputError(f"{name}: got {_shape(x)}, expected {wanted}")
    if x.ndim and x.device != input_ids.device:
        raise InvalidInputError(f"{name}: is on {x.device}, input_ids on {input_ids.device}; move one of them")


def _named(x: Any) -> str:
    return "None" if x is None else type(x).__qualname__


def _shape(x: Tensor) -> str:
    if x.is_nested and x.layout != torch.jagged:
        return f"a nested tensor of layout {x.layout}"
    return f"{'nested ' if x.is_nested else ''}shape {tuple(x.shape)}"


def _wanted(input_ids: Tensor, more: int | None, coarser: bool) -> str:
    count, columns = input_ids.shape[0], "j" if input_ids.is_nested else input_ids.shape[1]
    shape = f"({count}, {columns}"
    shapes = {0: f"{shape})", None: f"{shape}, ...)"}.get(more, f"{shape}) or {shape}, K)")
    what = f"a {'nested tensor of layout torch.jagged' if input_ids.is_nested else 'tensor'} {shapes}"
    if coarser:
        what = f"a number, a tensor ({count},), one for each sequence, or {what}"
    return f"{what}, a value for each place of input_ids"
