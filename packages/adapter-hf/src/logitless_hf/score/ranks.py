"""The processes that share a run: one, or those that `torchrun` started, over gloo."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from logitless.errors import InvalidInputError, LogitlessError

__all__ = ["Ranks", "join"]

# Once all are connected, a rank waits for the slowest as long as that one's share takes; one that died is noticed by
# its closed connection. Before, nothing tells a rank that died from one that is late: no wait outlasts --join-timeout.
_PATIENCE = timedelta(days=7)
_GRACE = timedelta(seconds=5)  # in which ranks that give up say so to one another
_POLL_S = 0.2


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
def join(timeout_s: int) -> Iterator[Ranks]:
    """The ranks of this run, from the variables that `torchrun` sets; alone without them.

    Args:
        timeout_s: seconds to wait for rank 0, then for all to be there, then for all to be connected.
    """
    size = _whole("WORLD_SIZE", 1)
    if size == 1:
        yield Ranks()
        return
    rank, local_rank = _whole("RANK", 0), _whole("LOCAL_RANK", 0)
    if not 0 <= rank < size:
        raise InvalidInputError(
            f"environment variable RANK: got {rank}, expected 0 or more and less than WORLD_SIZE, {size}; start with "
            "torchrun, or unset both"
        )
    with ExitStack() as stack:
        try:
            _connect(rank, size, timedelta(seconds=timeout_s), stack)
        except (RuntimeError, ValueError, TimeoutError) as error:
            reason = str(error).strip().splitlines()[0]
            if rank > 0 and isinstance(error, dist.DistNetworkError):
                reason = f"no word in time from rank 0: {reason}"
            raise LogitlessError(
                f"WORLD_SIZE is {size}, but rank {rank} cannot join the others ({reason}); see that one's own error, "
                f"start all within {timeout_s} s (--join-timeout) of one another, or with torchrun, or unset WORLD_SIZE"
            ) from error
        yield Ranks(rank, size, local_rank)


def _connect(rank: int, size: int, timeout: timedelta, stack: ExitStack) -> None:
    """Make the default group, which `stack` takes down; raise, with the ranks that are missing, if one is."""
    if rank > 0:
        _await_rank_0(timeout)
    # A store that waits for its whole world does not tell who is missing, so its world is this rank alone.
    store, _, _ = next(rendezvous("env://", world_size=1, timeout=timeout))
    _roll_call(store, "here", rank, size, timeout)
    failure: RuntimeError | None = None
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        stack.callback(dist.destroy_process_group)
    except RuntimeError as error:
        failure = error
    # All that live come here, connected or not: those that do not are why.
    _roll_call(store, "connected", rank, size, timeout if failure is None else min(timeout, _GRACE))
    if failure is not None:
        raise failure
    world: Any = dist.group.WORLD
    world.set_timeout(_PATIENCE)


def _await_rank_0(timeout: timedelta) -> None:
    """Wait for its store; torch's own wait takes twice the timeout, and prints a stack for each of its attempts."""
    host, port = os.environ.get("MASTER_ADDR"), _whole("MASTER_PORT", 0)
    deadline = time.monotonic() + timeout.total_seconds()
    while host and 0 < port < 1 << 16:  # else torch says what is wrong with them
        try:
            socket.create_connection((host, port), max(deadline - time.monotonic(), _POLL_S)).close()
            return
        except OSError as error:
            if time.monotonic() + _POLL_S > deadline:
                raise TimeoutError(f"no word in time from rank 0, {host}:{port}: {error}") from error
            time.sleep(_POLL_S)


def _roll_call(store: Any, step: str, rank: int, size: int, timeout: timedelta) -> None:
    """Say that this rank has come to a step and wait until all have; raise with those that have not."""
    came, told = ([f"logitless score/{step}/{what}/{of}" for of in range(size)] for what in ("came", "told"))
    if not store.check([came[rank]]):
        store.set(came[rank], "yes")
    try:
        store.wait(came, timeout)
    except dist.DistStoreError:
        for key in came:
            if not store.check([key]):
                store.set(key, "no")  # which ends the others' waits too
    missing = [of for of, answer in enumerate(store.multi_get(came)) if answer == b"no"]
    if missing:
        store.set(told[rank], "yes")
        if rank == 0:  # the store may be its own, so it stays until the others have read it
            with suppress(dist.DistStoreError):
                store.wait([key for of, key in enumerate(told) if of not in missing], min(timeout, _GRACE))
        raise TimeoutError(f"no word in time from {len(missing)} of {size}: rank {', '.join(map(str, missing))}")


def _whole(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise InvalidInputError(
            f"environment variable {name}: got {text!r}, expected an integer; start with torchrun, or unset it"
        ) from error
