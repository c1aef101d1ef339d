"""Products as a backend wrote them, whatever precision the program allows elsewhere.

The settings are the process's, not a thread's: the first call that runs changes them, the last to end puts them back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

__all__ = ["plain_arithmetic", "whole_sums"]

_SHORT_SUMS = (
    "allow_bf16_reduced_precision_reduction",  # torch's default: cuBLAS may add parts of a sum in bfloat16
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@contextmanager
def whole_sums() -> Iterator[None]:
    """cuBLAS sums half-precision products in float32 throughout, whatever the program allows it."""
    matmul: Any = torch.backends.cuda.matmul
    allowed = [name for name in _SHORT_SUMS if getattr(matmul, name, False)]
    split = {name: getattr(matmul, f"{name}_split_k", True) for name in allowed}
    for name in allowed:
        setattr(matmul, name, False)
    try:
        yield
    finally:
        for name in allowed:
            setattr(matmul, name, True if split[name] else (True, False))


@contextmanager
def _whole_products() -> Iterator[None]:
    """No TF32 or bfloat16 in float32 products."""
    backends: Any = torch.backends
    with ExitStack() as stack:
        try:
            precision = torch.get_float32_matmul_precision()
        except RuntimeError:  # the program uses torch's newer settings, and the older ones raise beside them
            for matmul in (backends.cuda.matmul, backends.mkldnn.matmul):
                if matmul.fp32_precision != "ieee":
                    stack.callback(setattr, matmul, "fp32_precision", matmul.fp32_precision)
                    matmul.fp32_precision = "ieee"
        else:
            if precision != "highest":
                stack.callback(torch.set_float32_matmul_precision, precision)
                torch.set_float32_matmul_precision("highest")
        yield


class _Settings:
    """The process's settings while calls run, in any number of threads."""

    def __init__(self) -> None:
        self._lock, self._users, self._changed = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._changed.enter_context(_whole_products())
                self._changed.enter_context(whole_sums())
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._changed.close()


_settings = _Settings()


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Products as the backend wrote them: no autocast of its fp32 sums, no TF32 or bf16 in its fp32 products.

    The device is made the current one: a kernel is launched there, wherever its tensors are.
    """
    with _settings, ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield
