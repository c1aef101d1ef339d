"""Collectives with the gradients that this project needs, over any torch.distributed group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather_rows", "gather_own_gradient"]


def all_gather_rows(x: Tensor, group: Any) -> Tensor:
    """[n, ...] of every rank, concatenated in rank order: [size·n, ...]."""
    x = x.contiguous()
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=group)
    return out


class _GatherOwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.rows, ctx.rank = x.shape[0], dist.get_rank(group)
        return all_gather_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.rank * ctx.rows : (ctx.rank + 1) * ctx.rows], None


def gather_own_gradient(x: Tensor, group: Any) -> Tensor:
    """`all_gather_rows`, for a loss that every rank computes alike from the whole: the gradient is the own rows'."""
    out: Tensor = _GatherOwnGradient.apply(x, group)  # type: ignore[no-untyped-call]
    return out
