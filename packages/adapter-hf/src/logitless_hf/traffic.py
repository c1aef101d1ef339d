"""Calls of one model from several threads: while one scores, the head's slot holds a stand-in, so none other may run.

An error, not a lock: who calls one model from two threads wants to know, and a lock would serialise plain calls too.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

from logitless.errors import UnsupportedError

__all__ = ["passing"]

_running: WeakKeyDictionary[nn.Module, Counter[tuple[int, bool]]] = WeakKeyDictionary()  # by (thread, whether scoring)
_mutex = threading.Lock()


@contextmanager
def passing(model: nn.Module, *, scoring: bool) -> Iterator[None]:
    """Around a call of the model's forward.

    Raises:
        UnsupportedError: another thread is in a call of this model, and one of the two scores.
    """
    if torch.compiler.is_compiling():
        yield
        return
    me = (threading.get_ident(), scoring)
    with _mutex:
        running = _running.setdefault(model, Counter())
        if any(thread != me[0] and (scoring or theirs) for thread, theirs in running):
            raise UnsupportedError(
                f"{type(model).__qualname__}: another thread is in a call of this model, and one of the two scores; "
                "let them wait for each other, or give each thread its own copy"
            )
        running[me] += 1
    try:
        yield
    finally:
        with _mutex:
            running[me] -= 1
            if not running[me]:
                del running[me]
