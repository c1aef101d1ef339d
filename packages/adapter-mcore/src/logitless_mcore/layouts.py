"""How Hugging Face tensors lie in a Megatron parameter, over tensor-parallel ranks.

Each layout is two functions that undo each other. Shape suffixes: G key groups, H query heads, E head size, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from logitless.errors import InvalidInputError

__all__ = ["Copy", "Gated", "Layout", "QueryKeyValue", "Split", "Vocabulary"]


class Layout(Protocol):
    """From Hugging Face's tensors to one rank's part of a parameter, and from all ranks' parts back."""

    def shard(self, parts: list[Tensor], gpt: Any, rank: int, size: int) -> Tensor:
        """This rank's part."""
        ...

    def merge(self, shards: list[Tensor], gpt: Any) -> list[Tensor]:
        """The tensors, of every rank's part in rank order."""
        ...


def _cut(whole: Tensor, rank: int, size: int, dim: int = 0) -> Tensor:
    if whole.shape[dim] % size:
        raise InvalidInputError(
            f"source: a dimension of {whole.shape[dim]} is not a multiple of {size} tensor-parallel ranks"
        )
    return whole.chunk(size, dim)[rank]


@dataclass(frozen=True, slots=True)
class Copy:
    """The same on every rank."""

    def shard(self, parts: list[Tensor], gpt: Any, rank: int, size: int) -> Tensor:
        """The tensor itself."""
        return parts[0]

    def merge(self, shards: list[Tensor], gpt: Any) -> list[Tensor]:
        """The first rank's."""
        return shards[:1]


@dataclass(frozen=True, slots=True)
class Split:
    """Cut along one dimension."""

    dim: int

    def shard(self, parts: list[Tensor], gpt: Any, rank: int, size: int) -> Tensor:
        """The rank-th part."""
        return _cut(parts[0], rank, size, self.dim)

    def merge(self, shards: list[Tensor], gpt: Any) -> list[Tensor]:
        """All parts joined."""
        return [torch.cat(shards, self.dim)]


@dataclass(frozen=True, slots=True)
class Gated:
    """Gate above up projection on each rank: not the whole gate on one and the whole up on another."""

    def shard(self, parts: list[Tensor], gpt: Any, rank: int, size: int) -> Tensor:
        """This rank's rows of both."""
        return torch.cat([_cut(part, rank, size) for part in parts])

    def merge(self, shards: list[Tensor], gpt: Any) -> list[Tensor]:
        """Gate, up."""
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]


@dataclass(frozen=True, slots=True)
class QueryKeyValue:
    """Group by group: the queries of a group, then its key, then its value; whole groups on each rank."""

    def shard(self, parts: list[Tensor], gpt: Any, rank: int, size: int) -> Tensor:
        """This rank's groups, [G / size · (H / G + 2) · E, D], or without D for a bias."""
        groups, per_group, head = self._sizes(gpt)
        if groups % size:
            raise InvalidInputError(
                f"model: num_query_groups={groups} is not a multiple of {size} tensor-parallel ranks"
            )
        tail = parts[0].shape[1:]
        q, k, v = parts
        blocks = [q.reshape(groups, per_group * head, *tail), *(x.reshape(groups, head, *tail) for x in (k, v))]
        return _cut(torch.cat(blocks, 1), rank, size).reshape(-1, *tail)

    def merge(self, shards: list[Tensor], gpt: Any) -> list[Tensor]:
        """Query, key, value."""
        groups, per_group, head = self._sizes(gpt)
        whole = torch.cat(shards)
        tail = whole.shape[1:]
        blocks = whole.reshape(groups, (per_group + 2) * head, *tail)
        return [block.reshape(-1, *tail) for block in torch.split(blocks, [per_group * head, head, head], 1)]

    @staticmethod
    def _sizes(gpt: Any) -> tuple[int, int, int]:
        config = gpt.config
        groups = config.num_query_groups or config.num_attention_heads
        return groups, config.num_attention_heads // groups, config.kv_channels


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Rows by token, padded with zeros to the model's size."""

    def shard(self, parts: list[Tensor], gpt: Any, rank: int, size: int) -> Tensor:
        """This rank's rows."""
        padded, rows = gpt.vocab_size, parts[0].shape[0]
        if rows > padded:
            raise InvalidInputError(f"model: vocab_size={padded}, expected at least the source's {rows} rows")
        return _cut(torch.cat((parts[0], parts[0].new_zeros(padded - rows, parts[0].shape[1]))), rank, size)

    def merge(self, shards: list[Tensor], gpt: Any) -> list[Tensor]:
        """All rows, padding included."""
        return [torch.cat(shards)]
