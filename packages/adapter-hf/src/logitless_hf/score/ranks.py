"""The processes that share a run: one, or those that `torchrun` started, over gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from logitless.errors import InvalidInputError, LogitlessError

__all__ = ["Ranks", "join"]

# Once all have joined, a rank waits for the slowest as long as that one's share takes; one that died is noticed by its
# closed connection. Before, nothing tells a rank that died from one that is late.
_PATIENCE = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    group: Any = None  # of all of them, with the patience of those that have joined; None: alone

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a step on all ranks and go on when all are through; if one fails, all raise, with its reason."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # whatever it is, the other ranks must not be left waiting
            failure = error
        if self.size > 1:
            reasons: list[str | None] = [None] * self.size
            try:
                dist.all_gather_object(reasons, None if failure is None else str(failure), self.group)
            except RuntimeError as error:  # gloo's word for a peer that is gone
                raise failure or LogitlessError(
                    f"rank {self.rank} of {self.size} stopped, because another rank ended; see that one's error"
                ) from error
            if failure is None:
                for rank, reason in enumerate(reasons):
                    if reason is not None:
                        raise LogitlessError(
                            f"rank {self.rank} of {self.size} stopped, because rank {rank} failed: {reason}"
                        )
        if failure is not None:
            raise failure

    def any(self, mine: bool) -> bool:
        """Whether it holds on any rank; all must ask."""
        if self.size == 1:
            return mine
        answers = [False] * self.size
        dist.all_gather_object(answers, mine, self.group)
        return True in answers


@contextmanager
def join(timeout_s: int) -> Iterator[Ranks]:
    """The ranks of this run, from the variables that `torchrun` sets; alone without them.

    Args:
        timeout_s: seconds to wait until all have joined.
    """
    size = _whole("WORLD_SIZE", 1)
    if size == 1:
        yield Ranks()
        return
    rank, local_rank = _whole("RANK", 0), _whole("LOCAL_RANK", 0)
    with ExitStack() as stack:
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
            stack.callback(dist.destroy_process_group)
            group = dist.new_group(timeout=_PATIENCE, backend="gloo")
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise LogitlessError(
                f"WORLD_SIZE is {size}, but the ranks cannot be joined ({reason}); start all of them within "
                f"{timeout_s} s (--join-timeout) of one another, or with torchrun, or unset WORLD_SIZE"
            ) from error
        yield Ranks(rank, size, local_rank, group)


def _whole(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise InvalidInputError(
            f"environment variable {name}: got {text!r}, expected an integer; start with torchrun, or unset it"
        ) from error
