from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from logitless.errors import LogitlessError
from logitless.testing.distributed import run_ranks
from logitless_hf.score.ranks import join


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free one, of rank 0 of two that were started by hand."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    for name, value in {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    return port


@pytest.mark.parametrize("came", [False, True], ids=["never started", "died while joining"])
def test_a_rank_that_does_not_join_is_not_waited_for_longer_than_asked(port: int, came: bool) -> None:
    def come_and_go() -> None:
        dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=30))

    other = threading.Thread(target=come_and_go)
    if came:
        other.start()
    began = time.monotonic()
    with (
        pytest.raises(LogitlessError, match=r"WORLD_SIZE is 2, but the ranks cannot be joined .* within 2 s \(--join"),
        join(2),
    ):
        pytest.fail("one rank is none of two")
    assert time.monotonic() - began < 20
    if came:
        other.join()
    assert not dist.is_initialized()


def late(rank: int, size: int) -> bool:
    dist.destroy_process_group()  # the helper's own
    os.environ["RANK"] = str(rank)
    with join(6) as ranks:
        time.sleep(7 * rank)
        return ranks.any(rank == 1)


@pytest.mark.usefixtures("port")
def test_ranks_that_joined_wait_for_the_slowest() -> None:
    assert run_ranks(2, late) == [True, True]
