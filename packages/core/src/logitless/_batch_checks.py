"""What a packed batch is made of: types, shapes and devices; of values it reads a float loss mask's alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.collectives import check_alike, debugging
from logitless.errors import InputTypeError, InvalidInputError

__all__ = [
    "as_tensors",
    "check_align",
    "check_beside",
    "check_device",
    "check_flat",
    "check_gathered",
    "check_ids",
    "check_int",
    "check_like",
    "check_loss_mask",
    "check_rows",
    "check_tensor",
]


def check_align(align: int) -> None:
    if not isinstance(align, int) or isinstance(align, bool) or not 1 <= align < 1 << 31:
        raise InvalidInputError(f"align: got {align!r}, expected an int of at least 1, and less than 2^31")


def check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInputError(f"{name}: got {value!r}, expected an int of at least {least}")


def check_device(device: Any) -> None:
    try:
        torch.empty(0, device=device)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        raise InvalidInputError(f"device: got {device!r}, expected a device of this machine: {error}") from error


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise InputTypeError(f"{name}: got {type(x).__qualname__}, expected a tensor")
    if x.layout not in (torch.strided, torch.jagged):
        raise InvalidInputError(f"{name}: got layout {x.layout}, expected a dense tensor; call to_dense()")


def check_beside(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise InvalidInputError(f"{name}: is on {x.device}, the batch on {device}; move one of them")


def check_rows(name: str, x: Any, count: int, shape: str, row: str, device: torch.device) -> None:
    check_tensor(name, x)
    if x.ndim == 0 or x.is_nested:
        raise InputTypeError(f"{name}: got {type(x).__qualname__}, expected a tensor {shape}, a row for each {row}")
    if x.shape[0] != count:
        raise InvalidInputError(f"{name}: got {x.shape[0]} rows, expected {count}, one for each {row}")
    check_beside(name, x, device)


def as_tensors(name: str, parts: Any, device: Any) -> list[Tensor]:
    """One tensor for each of a list of sequences, each of one dimension or more."""
    if (
        not isinstance(parts, (Sequence, Tensor))
        or isinstance(parts, str)
        or (isinstance(parts, Tensor) and not parts.ndim)
    ):
        raise InputTypeError(
            f"{name}: got {type(parts).__qualname__}, expected a list, a tensor or list for each sequence"
        )
    found = []
    for i, part in enumerate(parts):
        try:
            found.append(torch.as_tensor(part, device=device))
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputTypeError(
                f"{name}[{i}]: got what makes no tensor ({error}), expected a tensor or numbers"
            ) from error
        if found[-1].ndim == 0:
            raise InputTypeError(f"{name}[{i}]: got a number, expected one tensor or list for each sequence")
    return found


def check_ids(name: str, x: Tensor, ndim: int) -> None:
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise InputTypeError(f"{name}: got {getattr(x, 'dtype', type(x).__qualname__)}, expected an integer tensor")
    if x.ndim != ndim:
        raise InvalidInputError(f"{name}: got shape {tuple(x.shape)}, expected {ndim} dimension{'s' * (ndim > 1)}")


def check_like(name: str, x: Tensor, ids: Tensor) -> None:
    if not isinstance(x, Tensor) or x.shape != ids.shape:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__qualname__
        raise InvalidInputError(f"{name}: got {got}, expected shape {tuple(ids.shape)}, that of input_ids")
    if x.device != ids.device:
        raise InvalidInputError(f"{name}: is on {x.device}, input_ids on {ids.device}; move one of them")


def check_loss_mask(loss_M: Tensor) -> None:
    """Of floats, which may be weights, the values are looked at: another copy to the host."""
    if loss_M.is_floating_point():
        odd_M = (loss_M != 0) & (loss_M != 1)
        if odd_M.any():
            raise InvalidInputError(
                f"loss_mask: got {float(loss_M[odd_M][0])}, expected 0 or 1 for each token; pass loss_mask != 0, and "
                "multiply the loss by the weights, which PackedBatch.pack brings into its order"
            )


def check_flat(name: str, x: Tensor | None, ids_M: Tensor, most: int = 1) -> None:
    if x is not None and (not 1 <= x.ndim <= most or x.shape[-1] != ids_M.shape[0]):
        raise InvalidInputError(
            f"{name}: got shape {tuple(x.shape)}, expected {ids_M.shape[0]} entries, one for each token"
        )


def check_gathered(
    x: Tensor, group: Any, shard_of: tuple[int, int, str], tokens: int, padded_lengths: tuple[int, ...]
) -> None:
    """That each rank of a group hands in its own shard [P, ...] of one batch.

    What one rank alone has wrong is told to all, who would else wait for it; not on a GPU, where the host would wait.
    """
    rank, size, scheme = shard_of
    own, ranks = dist.get_rank(group), dist.get_world_size(group)
    if own >= 0 and (x.device.type == "cpu" or debugging()):
        facts = {
            "shard": "its own" if rank == own else f"that of rank {rank}",
            "shard's size": size,
            "x's shape": tuple(x.shape),
            "x's dtype": x.dtype,
            "padded lengths": padded_lengths,
            "scheme": scheme,
        }
        check_alike("group", group, facts, x.device)
    if ranks != size:
        raise InvalidInputError(f"group: has {ranks} ranks, expected the shard's {size}")
    if own != rank:
        raise InvalidInputError(
            f"group: this is its rank {own}, expected the shard's {rank}; shard(rank, size) takes the rank within the "
            "group"
        )
    if x.shape[:1] != (tokens,):
        raise InvalidInputError(
            f"x: got shape {tuple(x.shape)}, expected ({tokens}, ...), a row for each of its tokens"
        )
