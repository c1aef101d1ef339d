"""What a packed batch is made of: types, shapes and devices; reads no tensor's values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.collectives import check_alike, debugging
from logitless.errors import InputTypeError, InvalidInputError

__all__ = ["check_align", "check_flat", "check_gathered", "check_ids", "check_like"]


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


def check_gathered(
    x: Tensor, group: Any, shard_of: tuple[int, int, str], tokens: int, padded_lengths: tuple[int, ...]
) -> None:
    """That each rank of a group hands in its own shard [P, ...] of one batch."""
    rank, size, scheme = shard_of
    if dist.get_world_size(group) != size:
        raise InvalidInputError(f"group: has {dist.get_world_size(group)} ranks, expected the shard's {size}")
    if dist.get_rank(group) != rank:
        raise InvalidInputError(
            f"group: this is its rank {dist.get_rank(group)}, expected the shard's {rank}; shard(rank, size) takes the "
            "rank within the group"
        )
    if x.device.type == "cpu" or debugging():  # on a GPU the host would wait
        facts = {"x's shape": tuple(x.shape), "x's dtype": x.dtype, "padded lengths": padded_lengths, "scheme": scheme}
        check_alike("group", group, facts, x.device)
    if x.shape[:1] != (tokens,):
        raise InvalidInputError(
            f"x: got shape {tuple(x.shape)}, expected ({tokens}, ...), a row for each of its tokens"
        )
