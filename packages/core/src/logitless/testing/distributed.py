"""Several ranks on one machine: forked after the imports, so that a case takes a fraction of a second."""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["run_ranks"]


def _rank(
    connection: Connection, rank: int, size: int, store: str, seconds: float, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)  # a forked OpenMP pool has no threads, and waiting for them hangs
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=seconds),
        )
        connection.send((function(rank, size, *args), None))
    except BaseException as error:
        connection.send((None, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(size: int, function: Callable[..., Any], *args: Any, seconds: float = 60.0) -> list[Any]:
    """`function(rank, size, *args)` on `size` gloo ranks; their results in rank order.

    Raises:
        RuntimeError: a rank raised, died, or was not done in time; the message holds every rank's own traceback.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = []
        for rank in range(size):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(sending, rank, size, store, seconds, function, args))
            process.start()
            sending.close()
            ranks.append((process, receiving))
        results, faults = [], []
        for rank, (process, receiving) in enumerate(ranks):
            result, fault = None, f"rank {rank}: no answer within {seconds + 15} s"
            if receiving.poll(seconds + 15):
                try:
                    result, fault = receiving.recv()
                except EOFError:
                    fault = f"rank {rank}: died without a word"
            results.append(result)
            faults += [fault] if fault else []
        for process, _ in ranks:
            process.join(5)
            process.kill()
    if faults:
        raise RuntimeError("\n".join(faults))
    return results
