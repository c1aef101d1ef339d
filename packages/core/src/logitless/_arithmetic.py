"""Products as a backend wrote them, whatever precision the program allows elsewhere.

The settings are the process's, not a thread's: the first call that runs changes them, the last to end puts them back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

__all__ = ["plain_arithmetic"]

_SHORT_SUMS = (
    "allow_bf16_reduced_precision_reduction",  # torch's default: cuBLAS may add parts of a sum in bfloat16
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


def _made_plain() -> list[Callable[[], object]]:
    """Change what must be changed; returns what puts it back."""
    backends: Any = torch.backends
    matmul = backends.cuda.matmul
    undo: list[Callable[[], object]] = []
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the program uses torch's newer settings, and the older ones raise beside them
        for own in (matmul, backends.mkldnn.matmul):
            before = own.fp32_precision
            if before != "ieee":
                own.fp32_precision = "none"  # now it reads what it has from the settings above it, and stays so later
                undo.append(partial(setattr, own, "fp32_precision", "none" if own.fp32_precision == before else before))
                own.fp32_precision = "ieee"
    else:
        if precision != "highest":  # TF32 or bfloat16 in float32 products
            undo.append(partial(torch.set_float32_matmul_precision, precision))
            torch.set_float32_matmul_precision("highest")
    for name in _SHORT_SUMS:
        if getattr(matmul, name, False):
            split = getattr(matmul, f"{name}_split_k", True)
            undo.append(partial(setattr, matmul, name, True if split else (True, False)))
            setattr(matmul, name, False)
    return undo


class _Settings:
    """The process's settings while calls run, in any number of threads."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._undo = _made_plain()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for put_back in self._undo:
                    put_back()


_settings = _Settings()


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """No autocast of a backend's fp32 sums, no TF32 or bf16 in its fp32 products, cuBLAS's sums in fp32 throughout.

    The device is made the current one: a kernel is launched there, wherever its tensors are.
    """
    with _settings, ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield
