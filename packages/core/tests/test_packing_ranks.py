"""Packed batches of several ranks that differ, are idle or are gone: an error that tells, in time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from logitless import PackedBatch
from logitless.errors import InvalidInputError
from logitless.testing.distributed import RANKS, run_ranks

ON_GLOO = os.environ.get(RANKS, "gloo") == "gloo"
gloo_only = pytest.mark.skipif(not ON_GLOO, reason="NCCL ends a process whose peers are gone, and its log tells")
SECONDS = 10
LENGTHS = ([5, 3, 8, 2], [4])


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def packed(lengths: list[int], align: int = 1) -> PackedBatch:
    return PackedBatch.from_sequences([list(range(1, length + 1)) for length in lengths], align=align)


def gathered(rank: int, size: int) -> dict[str, str]:
    batch = packed([8, 4], align=4)
    own = batch.shard(rank, size)
    x, odd, group = own.input_ids.double(), rank == size - 1, dist.group.WORLD
    other = packed([4, 8], align=4).shard(rank, size)
    calls: dict[str, Callable[[], Any]] = {
        "rows": lambda: own.gather(x[:-1] if odd else x, group),
        "columns": lambda: own.gather(x.unsqueeze(1).expand(-1, 3) if odd else x.unsqueeze(1), group),
        "dtype": lambda: own.gather(x.float() if odd else x, group),
        "batch": lambda: (other if odd else own).gather(x, group),
        "scheme": lambda: batch.shard(rank, size, "contiguous" if odd else "zigzag").gather(x, group),
        "all": lambda: own.gather(x[:-1], group),
        "rank": lambda: batch.shard(size - 1 - rank, size).gather(x, group),
        "size": lambda: packed([8], align=8).shard(rank, 4).gather(x, group),
        "good": lambda: own.gather(x, group),
    }
    return {name: told(call) for name, call in calls.items()}


def test_gather_of_shards_that_do_not_belong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GLOO:
        monkeypatch.setenv("LOGITLESS_DEBUG", "1")  # else the host would have to wait for a GPU
    differs = "InvalidInputError: group: its ranks disagree ("
    right = {
        "rows": differs + "x's shape: rank 0 has (6,), rank 1 has (5,)",
        "columns": differs + "x's shape: rank 0 has (6, 1), rank 1 has (6, 3)",
        "dtype": differs + "x's dtype: rank 0 has torch.float64, rank 1 has torch.float32",
        "batch": differs + "padded lengths: rank 0 has (8, 4), rank 1 has (4, 8)",
        "scheme": differs + "scheme: rank 0 has zigzag, rank 1 has contiguous",
        "all": "InvalidInputError: x: got shape (5,), expected (6, ...)",
        "rank": differs + "shard: rank 0 has that of rank 1, rank 1 has that of rank 0",
        "size": "InvalidInputError: group: has 2 ranks, expected the shard's 4",
        "good": "no error",
    }
    for said in run_ranks(2, gathered, seconds=SECONDS):
        assert said.keys() == right.keys()
        for name, begins in right.items():
            assert said[name].startswith(begins), (name, said[name])


def cut_to_micro_batches(rank: int, size: int) -> list[Any]:
    group = dist.group.WORLD
    batch = packed(LENGTHS[rank])
    outer = batch.micro_batches(10, group=group)
    # The second rank's last one is idle: it has to take part in the counting all the same.
    inner = [part.micro_batches(8, group=group) for part in outer]
    too_long = told(lambda: batch.micro_batches(6 if rank == 0 else 100, group=group))
    return [[part.sequences for part in outer], [len(parts) for parts in inner], too_long]


def test_micro_batches_of_ranks_that_are_idle_or_in_error() -> None:
    first, second = run_ranks(2, cut_to_micro_batches, seconds=SECONDS)
    assert len(first[0]) == len(second[0]) == 2
    assert second[0].count(()) == 1
    assert first[1] == second[1]
    assert sum(first[1]) > len(first[0])
    assert first[2].startswith(
        "InvalidInputError: max_tokens: got 6, expected at least 8, the packed length of sequence 2"
    )
    assert second[2].startswith("InvalidInputError: max_tokens: got 100; another rank of the group has a sequence")


def idle_everywhere(rank: int, size: int) -> list[Any]:
    idle = packed([3])._idle()
    none = packed([])
    counts = [len(part.micro_batches(8, group=dist.group.WORLD)) for part in (idle, none)]
    parts = (none if rank else packed([3, 2])).micro_batches(3, group=dist.group.WORLD)
    return [counts, [part.input_ids.shape[0] for part in parts]]


def test_micro_batches_of_ranks_that_are_all_idle_or_have_no_sequence() -> None:
    """An idle batch stays one on every rank; a rank without sequences gets one token for each of another's batches."""
    assert run_ranks(2, idle_everywhere, seconds=SECONDS) == [[[1, 0], [3, 2]], [[1, 0], [1, 1]]]


def left_alone(rank: int, size: int, what: str, folder: str) -> None:
    dist.barrier()
    connected = Path(folder, "connected")
    if rank == 1:  # had it left before, the other would fail in its setup and not in its call
        while not connected.exists():
            time.sleep(0.01)
        os._exit(3)
    connected.touch()
    batch = packed([8, 4], align=4)
    own = batch.shard(rank, size)
    calls: dict[str, Callable[[], Any]] = {
        "gather": lambda: own.gather(own.input_ids, dist.group.WORLD),
        "micro_batches": lambda: batch.micro_batches(8, group=dist.group.WORLD),
    }
    Path(folder, "0").write_text(told(calls[what]))


@gloo_only
@pytest.mark.parametrize("what", ["gather", "micro_batches"])
def test_a_packed_batch_whose_other_rank_is_gone(what: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 1: died without a word"):
        run_ranks(2, left_alone, what, str(tmp_path), seconds=SECONDS)
    assert (tmp_path / "0").read_text().startswith("CollectiveError: a collective failed on rank 0 of 2 (")


def gathered_by_too_few(rank: int, size: int) -> None:
    shard = packed([7, 4], align=6).shard(rank, 3)
    shard.gather(shard.labels, dist.group.WORLD)


def test_gather_wants_the_shards_ranks() -> None:
    with pytest.raises(RuntimeError, match="InvalidInputError: group: has 2 ranks, expected the shard's 3"):
        run_ranks(2, gathered_by_too_few)


def gathered_in_vain(rank: int, size: int, shards: list[tuple[int, int]], rows: list[int]) -> str:
    shard = packed([8, 4], align=12).shard(*shards[rank])
    with pytest.raises(InvalidInputError) as found:
        shard.gather(torch.zeros(rows[rank]), dist.group.WORLD)
    return str(found.value)


@pytest.mark.parametrize(
    ("shards", "rows", "told"),
    [
        ([(0, 2), (0, 2)], [12, 12], "shard: rank 0 has its own, rank 1 has that of rank 0"),
        ([(1, 2), (0, 2)], [12, 12], "shard: rank 0 has that of rank 1, rank 1 has that of rank 0"),
        ([(0, 2), (1, 3)], [12, 12], "shard's size: rank 0 has 2, rank 1 has 3"),
        ([(0, 2), (1, 2)], [12, 11], "x's shape: rank 0 has (12,), rank 1 has (11,)"),
        ([(0, 2), (1, 2)], [11, 11], "x: got shape (11,), expected (12, ...)"),
    ],
    ids=["another's", "swapped", "size", "rows-of-one", "rows"],
)
def test_what_one_rank_hands_in_wrong_all_ranks_are_told(
    shards: list[tuple[int, int]], rows: list[int], told: str
) -> None:
    for of_rank in run_ranks(2, gathered_in_vain, shards, rows, seconds=5):
        assert told in of_rank
