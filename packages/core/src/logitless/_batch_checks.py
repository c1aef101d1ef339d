"""What a packed batch is made of: types, shapes and devices; reads no tensor's values."""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.errors import InputTypeError, InvalidInputError

__all__ = ["check_align", "check_flat", "check_ids", "check_like"]


def check_align(align: int) -> None:
    if not isinstance(align, int) or isinstance(align, bool) or align < 1:
        raise InvalidInputError(f"align: got {align!r}, expected an int of at least 1")


def check_ids(name: str, x: Tensor, ndim: int) -> None:
    if not isinstance(x, Tensor) or x.is_floating_point() or x.dtype == torch.bool:
        raise InputTypeError(f"{name}: got {getattr(x, 'dtype', type(x).__qualname__)}, expected an integer tensor")
    if x.ndim != ndim:
        raise InvalidInputError(f"{name}: got shape {tuple(x.shape)}, expected {ndim} dimension{'s' * (ndim > 1)}")


def check_like(name: str, x: Tensor, ids: Tensor) -> None:
    if not isinstance(x, Tensor) or x.shape != ids.shape:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__qualname__
        raise InvalidInputError(f"{name}: got {got}, expected shape {tuple(ids.shape)}, that of input_ids")
    if x.device != ids.device:
        raise InvalidInputError(f"{name}: is on {x.device}, input_ids on {ids.device}; move one of them")


def check_flat(name: str, x: Tensor | None, ids_M: Tensor) -> None:
    if x is not None and x.shape[-1] != ids_M.shape[0]:
        raise InvalidInputError(f"{name}: got {x.shape[-1]} entries, expected {ids_M.shape[0]}, one for each token")
