"""Several ranks on one machine: forked after the imports, so that a case takes a fraction of a second.

They are gloo's, on the CPU. With LOGITLESS_RANKS=nccl the same functions run on a GPU for each rank, as they stand:
tensors and modules among their arguments are moved there, and what they make without naming a device is made on the CPU
and moved, so that it has the same values. The process that forks must not have used CUDA.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import importlib
import io
import multiprocessing
import os
import tempfile
import traceback
import unittest
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map

from logitless.errors import InvalidInputError

__all__ = ["RANKS", "run_ranks"]

RANKS = "LOGITLESS_RANKS"


class _MadeOn(TorchFunctionMode):
    """What is made without naming a device is made on the CPU, from its generators, and moved."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        return func(*args, **kwargs).to(self.device).requires_grad_(requires_grad)


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors and modules in containers and dataclasses, on a device."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().to(device).requires_grad_(leaf.requires_grad)
        if isinstance(leaf, nn.Module):
            return leaf.to(device)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = [field.name for field in dataclasses.fields(leaf) if field.init]
            return dataclasses.replace(leaf, **{name: _moved(getattr(leaf, name), device) for name in fields})
        return leaf

    return tree_map(move, value)


def _rank(
    connection: Connection, rank: int, size: int, store: str, seconds: float, function: Callable[..., Any], args: Any
) -> None:
    gpu = torch.device("cuda", rank) if os.environ.get(RANKS) == "nccl" else None
    faulthandler.disable()  # a rank that is meant to die need not print its stack
    torch.set_num_threads(1)  # a forked OpenMP pool has no threads, and waiting for them hangs
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            store=dist.FileStore(store, size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=seconds),
        )
        with ExitStack() as stack:
            if gpu:  # which is not made the current one: rank 1's tensors are on the second while that is the first
                args = _moved(args, gpu)
                stack.enter_context(_MadeOn(gpu))
            found = function(rank, size, *args)
        answer: tuple[Any, str | None] = (_moved(found, torch.device("cpu")) if gpu else found, None)
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
    """`function(rank, size, *args)` on `size` ranks; their results in rank order.

    Raises:
        InvalidInputError: LOGITLESS_RANKS is neither "gloo" nor "nccl".
        unittest.SkipTest: with "nccl", there are not as many GPUs.
        RuntimeError: a rank raised, died, or was not done in time; the message holds every rank's own traceback.
    """
    wanted = os.environ.get(RANKS, "gloo")
    if wanted not in ("gloo", "nccl"):
        raise InvalidInputError(f"{RANKS}: got {wanted!r}, expected 'gloo' or 'nccl'")
    if wanted == "nccl" and torch.cuda.device_count() < size:
        raise unittest.SkipTest(f"{size} ranks need as many GPUs; here are {torch.cuda.device_count()}")
    importlib.import_module("torch._dynamo")  # a custom op's first call loads it: once here, not once in each rank

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
