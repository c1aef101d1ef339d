"""The processes that share a run: one, or those that `torchrun` started, over gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from logitless.errors import InvalidInputError, LogitlessError

__all__ = ["Ranks", "join"]

# A rank may wait for the slowest as long as that one's share takes; one that died is noticed by its closed connection.
_PATIENCE = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

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
                dist.all_gather_object(reasons, None if failure is None else str(failure))
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
        dist.all_gather_object(answers, mine)
        return True in answers


@contextmanager
def join() -> Iterator[Ranks]:
    """The ranks of this run, from the variables that `torchrun` sets; alone without them."""
    size = _whole("WORLD_SIZE", 1)
    if size == 1:
        yield Ranks()
        return
    ranks = Ranks(_whole("RANK", 0), size, _whole("LOCAL_RANK", 0))
    try:
        dist.init_process_group("gloo", timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise LogitlessError(
            f"WORLD_SIZE is {size}, but the ranks cannot be joined ({error}); start with torchrun, or unset WORLD_SIZE"
        ) from error
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def _whole(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise InvalidInputError(
            f"environment variable {name}: got {text!r}, expected an integer; start with torchrun, or unset it"
        ) from error
