"""Products as a backend wrote them, whatever precision the program allows elsewhere.

The settings are the process's, not a thread's: the first call that runs changes them, the last to end puts them back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

__all__ = ["plain_arithmetic"]

Undo = list[Callable[[], object]]
"""What puts settings back, from the last to the first."""


def _accessors(name: str) -> tuple[Callable[[], Any], Callable[..., None]]:
    """What gets and sets a setting of `torch.backends.cuda.matmul`.

    The functions that it calls itself, where torch has them: its Python takes several times as long, at every call.
    Torch 2.9's have a bool, later ones (seen up to 2.14) a pair, whose second is for the parts of a sum split along k.
    """
    get, change = (getattr(torch._C, f"_{verb}_cublas_{name}", None) for verb in ("get", "set"))
    if get is not None and change is not None:
        return get, change
    public: Any = torch.backends.cuda.matmul
    return partial(getattr, public, name, False), partial(setattr, public, name)


_SHORT_SUMS = [
    _accessors("allow_bf16_reduced_precision_reduction"),  # torch's default: cuBLAS may add parts of a sum in bfloat16
    _accessors("allow_fp16_reduced_precision_reduction"),
    _accessors("allow_fp16_accumulation"),
]


def _plain_products(undo: Undo) -> None:
    """No TF32 or bfloat16 in float32 products."""
    backends: Any = torch.backends
    products = (backends.cuda.matmul, backends.mkldnn.matmul)
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the program uses torch's newer settings, and the older ones raise beside them
        for own in products:
            before = own.fp32_precision
            if before != "ieee":
                own.fp32_precision = "none"  # now it reads what it has from the settings above it, and stays so later
                undo.append(partial(setattr, own, "fp32_precision", "none" if own.fp32_precision == before else before))
                own.fp32_precision = "ieee"
    else:
        if precision != "highest":
            # Putting it back sets both of these, and the program may have set one alone (allow_tf32 does).
            undo.extend(partial(setattr, own, "fp32_precision", own.fp32_precision) for own in products)
            undo.append(partial(torch.set_float32_matmul_precision, precision))
            torch.set_float32_matmul_precision("highest")


def _whole_sums(undo: Undo) -> None:
    """cuBLAS sums half-precision products in float32 throughout."""
    for get, change in _SHORT_SUMS:
        before = get()
        allowed, *split = before if isinstance(before, tuple) else (before,)
        if allowed:
            undo.append(partial(change, allowed, *split))
            change(False, *split)


class _Settings:
    """Settings of the process while calls run, in any number of threads; `changes` say what puts each back."""

    def __init__(self, *changes: Callable[[Undo], None]) -> None:
        self._changes = changes
        self.forget()
        if hasattr(os, "register_at_fork"):  # a child has none of the threads whose calls run
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """As before any call."""
        self._lock, self._users = threading.Lock(), 0
        self._undo: Undo = []

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                try:
                    for change in self._changes:
                        change(self._undo)
                except BaseException:
                    self._put_back()
                    raise
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._put_back()

    def _put_back(self) -> None:
        while self._undo:
            self._undo.pop()()


_plain = _Settings(_plain_products, _whole_sums)


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """No autocast of a backend's fp32 sums, no TF32 or bf16 in its fp32 products, cuBLAS's sums in fp32 throughout.

    The device is made the current one: a kernel is launched there, wherever its tensors are.
    """
    kind = device.type
    # By its number: for anything else torch's Python finds that out first, while a small call's backward waits.
    current = torch.cuda.device(device.index) if kind == "cuda" else nullcontext()
    autocast = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
    with _plain, current, autocast:
        yield
