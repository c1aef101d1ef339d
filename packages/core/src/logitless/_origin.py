"""The layouts that a packed batch comes from: their true tokens one after another, values along with them, and back.

A layout is "padded" rows [B, S], a "nested" tensor [B, j], or a "list" of sequences.

Shape suffix: M true tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from logitless._batch_checks import (
    as_tensors,
    check_beside,
    check_device,
    check_flat,
    check_ids,
    check_like,
    check_tensor,
)
from logitless._segments import cumulated, jagged_values, placed
from logitless.errors import InputTypeError, InvalidInputError

__all__ = ["Origin", "TrueTokens", "listed_tokens", "nested_tokens", "padded_tokens"]

Kind = Literal["padded", "nested", "list"]


@dataclass(frozen=True, slots=True)
class Origin:
    """The layout that a batch came from."""

    kind: Kind
    shape: tuple[int, ...]  # padded: (B, S); else (M,)
    lengths: tuple[int, ...]  # true ones, on the host
    offsets: Tensor  # [B+1] where each sequence begins among the true tokens

    @classmethod
    def of(cls, kind: Kind, lengths: Sequence[int], device: torch.device, columns: int = 0) -> Origin:
        shape = (len(lengths), columns) if kind == "padded" else (sum(lengths),)
        return cls(kind, shape, tuple(lengths), torch.tensor(cumulated(lengths), device=device))

    def select(self, source_M: Tensor, row_M: Tensor, lengths: Sequence[int]) -> tuple[Origin, Tensor]:
        """The same layout of some of the sequences, and where their true tokens stand in it.

        Args:
            source_M: where these tokens stand in the flattened layout.
            row_M: which of these sequences each is of.
            lengths: of these sequences.
        """
        columns = self.shape[1] if self.kind == "padded" else 0
        origin = Origin.of(self.kind, lengths, source_M.device, columns)
        if self.kind == "padded":
            return origin, row_M * columns + source_M % columns
        return origin, torch.arange(source_M.shape[0], device=source_M.device)

    def flatten(self, x: Any) -> Tensor:
        """Values in this layout as [positions, ...]."""
        device = self.offsets.device
        if self.kind == "padded":
            if not isinstance(x, Tensor) or tuple(x.shape[:2]) != self.shape:
                got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__qualname__
                raise InvalidInputError(
                    f"x: got {got}, expected a tensor {self.shape} + trailing dimensions: a value for each "
                    "position, the first of a sequence too; for one value a sequence, of='sequence'"
                )
            check_beside("x", x, device)
            return x.flatten(0, 1)
        if isinstance(x, Tensor) and x.is_nested:
            check_beside("x", x, device)
            flat, lengths = jagged_values(x)
        else:
            parts = as_tensors("x", x, device)
            flat = torch.cat(parts) if parts else torch.zeros(0, device=device)
            lengths = [part.shape[0] for part in parts]
        if tuple(lengths) != self.lengths:
            raise InvalidInputError(f"x: got lengths {lengths}, expected {list(self.lengths)}")
        return flat

    def restore(self, x_M: Tensor, source_M: Tensor, fill: float) -> Any:
        """Values of the true tokens [M, ...] in this layout; `fill` where it holds none of them."""
        if self.kind == "padded":
            rows, columns = self.shape
            return placed(x_M, source_M, rows * columns, fill).view(rows, columns, *x_M.shape[1:])
        if self.kind == "list":
            return list(torch.split(x_M, list(self.lengths)))
        return torch.nested.nested_tensor_from_jagged(x_M, self.offsets)


@dataclass(frozen=True, slots=True)
class TrueTokens:
    """A layout's tokens without its padding, one after another."""

    ids_M: Tensor
    loss_M: Tensor | None
    position_M: Tensor | None  # or [k, M]
    source_M: Tensor  # where each stands in the flattened layout
    origin: Origin


def padded_tokens(
    input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor | None, position_ids: Tensor | None
) -> TrueTokens:
    check_ids("input_ids", input_ids, 2)
    check_like("attention_mask", attention_mask, input_ids)
    mask = attention_mask != 0
    odd = (mask & (attention_mask != 1)).sum(1)
    lengths, odds = torch.stack((mask.sum(1), odd)).tolist()  # the one copy
    if any(odds):
        raise InvalidInputError("attention_mask: got values other than 0 and 1, expected a mask of tokens")
    source_M = torch.nonzero_static(mask.flatten(), size=sum(lengths)).squeeze(1)
    if position_ids is not None:
        check_tensor("position_ids", position_ids)
        check_like("position_ids", position_ids[0] if position_ids.ndim == 3 else position_ids, input_ids)
        position_ids = position_ids.flatten(-2).index_select(-1, source_M)
    if loss_mask is not None:
        check_like("loss_mask", loss_mask, input_ids)
        loss_mask = loss_mask.flatten().index_select(0, source_M)
    ids_M = input_ids.flatten().index_select(0, source_M)
    origin = Origin.of("padded", lengths, ids_M.device, input_ids.shape[1])
    return TrueTokens(ids_M, loss_mask, position_ids, source_M, origin)


def nested_tokens(input_ids: Tensor, loss_mask: Tensor | None, position_ids: Tensor | None) -> TrueTokens:
    if not (isinstance(input_ids, Tensor) and input_ids.is_nested and input_ids.layout == torch.jagged):
        raise InputTypeError("input_ids: expected a nested tensor of layout torch.jagged [B, j]; see from_padded")
    ids_M, lengths = jagged_values(input_ids)
    check_ids("input_ids", ids_M, 1)

    def values(name: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        check_tensor(name, x)
        if not x.is_nested:
            return x
        found, own = jagged_values(x)
        _check_lengths(name, own, lengths)
        return found

    loss_M, position_M = values("loss_mask", loss_mask), values("position_ids", position_ids)
    check_flat("loss_mask", loss_M, ids_M)
    check_flat("position_ids", position_M, ids_M, most=2)
    return _in_order("nested", ids_M, lengths, loss_M, position_M)


def listed_tokens(
    input_ids: Sequence[Tensor | Sequence[int]],
    loss_mask: Sequence[Tensor | Sequence[int]] | None,
    position_ids: Sequence[Tensor] | None,
    device: torch.device | str | None,
) -> TrueTokens:
    check_device(device)
    # torch takes [] as floats
    ids = [x if x.numel() else x.long() for x in as_tensors("input_ids", input_ids, device)]
    for i, x in enumerate(ids):
        check_ids(f"input_ids[{i}]", x, 1)
    lengths = [x.shape[0] for x in ids]

    def joined(name: str, parts: Sequence[Any] | None) -> Tensor | None:
        if parts is None:
            return None
        tensors = as_tensors(name, parts, device)
        _check_lengths(name, [x.shape[-1] for x in tensors], lengths)
        return torch.cat(tensors, dim=-1) if tensors else None

    ids_M = torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int64, device=device)
    return _in_order("list", ids_M, lengths, joined("loss_mask", loss_mask), joined("position_ids", position_ids))


def _check_lengths(name: str, lengths: list[int], expected: list[int]) -> None:
    if lengths != expected:
        raise InvalidInputError(f"{name}: got lengths {lengths}, expected those of input_ids, {expected}")


def _in_order(
    kind: Kind, ids_M: Tensor, lengths: list[int], loss_M: Tensor | None, position_M: Tensor | None
) -> TrueTokens:
    """Of a layout that holds true tokens alone."""
    source_M = torch.arange(ids_M.shape[0], device=ids_M.device)
    return TrueTokens(ids_M, loss_M, position_M, source_M, Origin.of(kind, lengths, ids_M.device))
