"""Several ranks on one machine: forked after the imports, so that a case takes a fraction of a second."""

from __future__ import annotations

import datetime
import faulthandler
import io
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
    faulthandler.disable()  # a rank that is meant to die need not print its stack
    torch.set_num_threads(1)  # a forked OpenMP pool has no threads, and waiting for them hangs
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=seconds),
        )
        answer: tuple[Any, str | None] = (function(rank, size, *args), None)
    except BaseException as error:
        answer = (None, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}")
    try:
        buffer = io.BytesIO()  # by value: tensors sent as they are would be shared memory of a process that is gone
        torch.save(answer, buffer)
        connection.send_bytes(buffer.getvalue())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(size: int, function: Callable[..., Any], *args: Any, seconds: float = 60.0) -> list[Any]:
    """`function(rank, size, *args)` on `size` gloo ranks; their results in rank order.

    Raises:
        RuntimeError: a rank raised, died, or was not done in time; the message holds every rank's own traceback.
    """
    import torch._dynamo  # a custom op's first call loads it: once here, not once in each rank

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
        results: list[Any] = []
        faults: list[str] = []
        for rank, (_, receiving) in enumerate(ranks):
            result, fault = None, f"rank {rank}: no answer within {seconds + 15} s"
            if receiving.poll(seconds + 15):
                try:
                    result, fault = torch.load(io.BytesIO(receiving.recv_bytes()), weights_only=False)
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
