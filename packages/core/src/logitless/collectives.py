"""The few collectives that core and its backends need, over any torch.distributed group."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from logitless.errors import InputTypeError, InvalidInputError

__all__ = [
    "all_gather_rows",
    "all_reduce",
    "check_agreement",
    "debugging",
    "gather_own_gradient",
    "gather_stacked",
    "group_facts",
    "resolve_group",
]

DEBUG = "LOGITLESS_DEBUG"
FACTS_BYTES = 4096


def group_facts(group: Any) -> tuple[int, int, str]:
    """(rank, size, name) of a process group of which this process is a member."""
    outside = dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER
    if not outside and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise InputTypeError(f"tp_group: got {type(group).__qualname__}, expected a torch.distributed ProcessGroup")
    if outside or dist.get_rank(group) < 0:
        raise InvalidInputError("tp_group: this process is not one of its ranks; pass the group that it belongs to")
    return dist.get_rank(group), dist.get_world_size(group), group.group_name


def resolve_group(name: str) -> Any:
    """The process group of that name, as `group_facts` gave it; custom ops carry strings only."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def all_reduce(x: Tensor, group: Any) -> None:
    """Sum over the ranks, in place."""
    dist.all_reduce(x, group=group)


def all_gather_rows(x: Tensor, group: Any) -> Tensor:
    """[n, ...] of every rank, one after another in rank order: [size·n, ...]."""
    x = x.contiguous()
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def gather_stacked(x: Tensor, group: Any) -> Tensor:
    """[k, n] of every rank: [size, k, n]."""
    return all_gather_rows(x.unsqueeze(0), group)


class _GatherOwnGradient(Function):
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


def debugging() -> bool:
    """Whether LOGITLESS_DEBUG=1 asks for checks that cost time."""
    return os.environ.get(DEBUG) == "1"


def check_agreement(group: Any, facts: Mapping[str, object], device: torch.device) -> None:
    """Raise on every rank, naming what differs, if the ranks' facts are not the same.

    They travel as text in a tensor of fixed length: torch's own gathering of objects needs numpy.
    """
    text = json.dumps({name: str(fact) for name, fact in facts.items()}).encode()[:FACTS_BYTES].ljust(FACTS_BYTES)
    gathered = gather_stacked(torch.tensor([list(text)], dtype=torch.uint8, device=device), group)
    everyone = [json.loads(bytes(one[0].tolist())) for one in gathered]
    differing = [name for name in facts if len({one[name] for one in everyone}) > 1]
    if differing:
        told = "; ".join(
            f"{name}: " + ", ".join(f"rank {rank} has {one[name]}" for rank, one in enumerate(everyone))
            for name in differing
        )
        raise InvalidInputError(f"tp_group: its ranks disagree ({told}); every rank must score the same tokens")
