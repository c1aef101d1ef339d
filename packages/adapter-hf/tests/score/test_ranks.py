from __future__ import annotations

import os
import re
import socket
import time
from typing import Any

import pytest
import torch.distributed as dist

from logitless.errors import InvalidInputError, LogitlessError
from logitless.testing.distributed import run_ranks
from logitless_hf.score.ranks import join


@pytest.fixture
def ranks_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of rank 0 of two that were started by hand, with a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("ranks_of_two")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_was_never_started_is_named_after_the_timeout(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(rank))
    began = time.monotonic()
    with (
        pytest.raises(
            LogitlessError,
            match=rf"rank {rank} cannot join the others \(no word in time from .*rank {1 - rank}\b.* 2 s \(--join",
        ),
        join(2),
    ):
        pytest.fail("one rank is none of two")
    assert time.monotonic() - began < 20
    assert not dist.is_initialized()


def leave_the_helpers_group() -> None:
    dist.barrier()  # else one that is still connecting fails
    dist.destroy_process_group()


class Dead(BaseException):
    """The end of a rank that no other is told of."""


def outcome(rank: int, size: int, dying: int, after: bool) -> str:
    """What comes of joining where one rank ends right before or after it connects to the others."""
    leave_the_helpers_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    connect = dist.init_process_group

    def die(*args: Any, **kwargs: Any) -> None:
        if after:
            connect(*args, **kwargs)
        raise Dead

    with pytest.MonkeyPatch.context() as patch:
        if rank == dying:
            patch.setattr(dist, "init_process_group", die)
        try:
            with join(6):
                return "joined"
        except Dead:
            return "dead"
        except LogitlessError as error:
            return str(error)


@pytest.mark.usefixtures("ranks_of_two")
@pytest.mark.parametrize("after", [False, True], ids=["before connecting", "after connecting"])
@pytest.mark.parametrize("dying", [0, 2])
def test_a_rank_that_dies_while_joining_is_named_within_the_timeout(dying: int, after: bool) -> None:
    found = run_ranks(3, outcome, dying, after, seconds=30)
    assert found.pop(dying) == "dead"
    for message in found:
        assert re.search(rf"cannot join the others \(no word in time from .*rank {dying}[:)]", message)


def late(rank: int, size: int) -> bool:
    leave_the_helpers_group()
    os.environ["RANK"] = str(rank)
    with join(6) as ranks:
        time.sleep(7 * rank)
        return ranks.any(rank == 1)


@pytest.mark.usefixtures("ranks_of_two")
def test_ranks_that_joined_wait_for_the_slowest() -> None:
    assert run_ranks(2, late) == [True, True]


@pytest.mark.usefixtures("ranks_of_two")
def test_a_rank_beyond_the_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(InvalidInputError, match="RANK: got 2, expected 0 or more and less than WORLD_SIZE, 2"), join(2):
        pytest.fail("there is no third of two")
