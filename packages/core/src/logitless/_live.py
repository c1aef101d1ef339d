"""Which tokens are live: asked of the device at once, and read when the host must know.

It is the one device-to-host copy of a validated call. Between the question and the answer the host can go on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitless._validate import check_facts, value_facts

__all__ = ["Live"]


class Live:
    """The labels that are not ignored, with every value of a call checked on the way.

    Args:
        labels: [N] or [N, K] int64; a token is live if one of its labels is.
        temperature: [N], or None where a number was checked before.
        validate: False asks nothing: every token counts as live, and nothing is checked.
    """

    def __init__(
        self, labels: Tensor, temperature: Tensor | None, ignore_index: int, vocab_size: int, validate: bool
    ) -> None:
        self._call = (labels, temperature, ignore_index, vocab_size)
        self._known = None if validate and labels.shape[0] else labels.shape[0]
        self._copied: torch.cuda.Event | None = None
        if self._known is None:
            self._facts = value_facts(labels, temperature, ignore_index)
            self._on_host = self._facts
            if labels.is_cuda:
                self._on_host = torch.empty(self._facts.shape, dtype=self._facts.dtype, pin_memory=True)
                self._on_host.copy_(self._facts, non_blocking=True)
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record(torch.cuda.current_stream(labels.device))

    @property
    def on_device(self) -> Tensor | None:
        """[] int64, how many are live, where the host does not know it yet and can go on without."""
        return self._facts[0] if self._copied is not None and self._known is None else None

    @property
    def count(self) -> int:
        """How many are live; waits for the device, and raises if a label or a temperature is out of range."""
        if self._known is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._known = check_facts(self._on_host.tolist(), *self._call)
        return self._known

    @property
    def indices(self) -> Tensor | None:
        """[n] ascending indices of the live tokens; None where all are."""
        labels, _, ignore_index, _ = self._call
        if self.count == labels.shape[0]:
            return None
        live = labels != ignore_index
        return torch.nonzero_static(live.any(1) if live.ndim == 2 else live, size=self.count).squeeze(1)
