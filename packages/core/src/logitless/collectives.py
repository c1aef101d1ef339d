"""The few collectives that core and its backends need, over any torch.distributed group."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from logitless.errors import CollectiveError, InputTypeError, InvalidInputError

__all__ = [
    "Agreement",
    "all_gather_rows",
    "all_reduce",
    "all_reduce_max",
    "check_agreement",
    "check_alike",
    "debugging",
    "gather_own_gradient",
    "gather_stacked",
    "group_facts",
    "resolve_group",
]

DEBUG = "LOGITLESS_DEBUG"
FACTS_BYTES, FACT_LETTERS = 8192, 100  # a divergence has some forty facts


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
    with _told(group):
        dist.all_reduce(x, group=group)


def all_reduce_max(x: Tensor, group: Any) -> None:
    """The largest of the ranks, in place."""
    with _told(group):
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)


def all_gather_rows(x: Tensor, group: Any) -> Tensor:
    """[n, ...] of every rank, one after another in rank order: [size·n, ...]."""
    x = x.contiguous()
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    with _told(group):
        # From torch 2.13 on the older name warns at every call.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(out, x, group=group)
    return out


@contextmanager
def _told(group: Any) -> Iterator[None]:
    """torch says of a collective that failed where in its transport; here is what to look for."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CollectiveError(
            f"a collective failed on rank {dist.get_rank(group)} of {dist.get_world_size(group)} ({error}): another "
            "rank died, raised an error, or did not make this call within the group's timeout; look for the first "
            f"error in the other ranks' logs; for calls on a GPU with validate=False, {DEBUG}=1 compares the ranks"
        ) from error


def gather_stacked(x: Tensor, group: Any) -> Tensor:
    """[...] of every rank: [size, ...]."""
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


def _number(facts: Mapping[str, object]) -> int:
    """The facts as one number, which differs where they do."""
    return zlib.crc32(repr(tuple(facts.items())).encode())


def _brief(fact: object) -> str:
    """A fact's text; of a long one (a batch's lengths) its beginning, and a number that differs where the rest does."""
    text = str(fact)
    return text if len(text) <= FACT_LETTERS else f"{text[:FACT_LETTERS]}... (crc32 {zlib.crc32(text.encode()):08x})"


def check_alike(name: str, group: Any, facts: Mapping[str, object], device: torch.device) -> None:
    """Raise on every rank, naming what differs, if the ranks' facts are not the same; waits for the device."""
    numbers = all_gather_rows(torch.tensor([_number(facts)], device=device), group).tolist()
    if len(set(numbers)) > 1:
        check_agreement(group, facts, device, name)


def check_agreement(group: Any, facts: Mapping[str, object], device: torch.device, argument: str = "tp_group") -> None:
    """Raise on every rank, naming what differs, if the ranks' facts are not the same.

    They travel as text in a tensor of fixed length: torch's own gathering of objects needs numpy.
    """
    text = json.dumps({name: _brief(fact) for name, fact in facts.items()}).encode().ljust(FACTS_BYTES)
    gathered = gather_stacked(torch.tensor(list(text), dtype=torch.uint8, device=device), group)
    everyone = [json.loads(bytes(one.tolist())) for one in gathered]
    names = dict.fromkeys(name for one in everyone for name in one)
    differing = [name for name in names if len({one.get(name) for one in everyone}) > 1]
    if differing:
        told = "; ".join(
            f"{name}: " + ", ".join(f"rank {rank} has {one.get(name)}" for rank, one in enumerate(everyone))
            for name in differing
        )
        raise InvalidInputError(
            f"{argument}: its ranks disagree ({told}); every rank must make the same call, of the same tokens with the "
            "same options, on its own share"
        )


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the ranks of a call must have in common, compared before they rely on it.

    Ranks that differ would else get sums of unlike things, which look like scores; or, where sizes differ, gloo ends
    the process. One small gather of numbers tells whether they differ; only then do the facts travel, to be named.
    """

    group: Any
    facts: Mapping[str, object]
    span: tuple[int, int]  # vocab rows of this rank
    vocab_size: int

    def gather(self, values: Tensor) -> Tensor:
        """[size, k + 3] of [k] int64 values, of the same k on every rank, the facts as one number, and the span."""
        own = torch.cat((values, values.new_tensor([_number(self.facts), *self.span])))
        return gather_stacked(own, self.group)

    def checked(self, everyone: list[list[int]], names: tuple[str, ...], device: torch.device) -> list[int]:
        """This rank's values; raises on every rank if they or the facts differ, or vocab rows are not on one rank."""
        own = everyone[dist.get_rank(self.group)][: len(names)]
        if len({tuple(one[:-2]) for one in everyone}) > 1:
            check_agreement(self.group, {**self.facts, **dict(zip(names, own, strict=True))}, device)
        spans = [(min(one[-2], self.vocab_size), min(one[-1], self.vocab_size)) for one in everyone]  # padding aside
        ends = [0, *(end for span in sorted(spans) if span[0] < span[1] for end in span), self.vocab_size]
        if ends[::2] == ends[1::2]:
            return own
        told = ", ".join(f"rank {rank} has {start} to {stop}" for rank, (*_, start, stop) in enumerate(everyone))
        raise InvalidInputError(
            f"tp_group: the ranks' vocab rows ({told}) do not hold each of the {self.vocab_size} of the vocabulary "
            "once; set head.vocab_start to each rank's first row, and head.vocab_size to the rows of all ranks"
        )
