"""Which tokens are live: asked of the device at once, and read when the host must know.

It is the one device-to-host copy of a validated call. Between the question and the answer the host can go on.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from logitless._validate import check_facts, value_facts
from logitless.collectives import Agreement

__all__ = ["Live", "SomeIgnored"]


FACTS = (
    "live labels",
    "least label",
    "greatest label",
    "bad temperatures",
    "checksum of labels",
    "checksum of temperatures",
)


class SomeIgnored(Exception):
    """Out of a backend that began before the host knew, as if no token were ignored."""


class Live:
    """The labels that are not ignored, with every value of a call checked on the way.

    Args:
        labels: [N] or [N, K] int64; a token is live if one of its labels is.
        temperature: [N], or None where a number was checked before.
        validate: False asks nothing: every token counts as live, and nothing is checked.
        agreement: of the ranks that share the call, whose values are compared with the same copy.
    """

    def __init__(
        self,
        labels: Tensor,
        temperature: Tensor | None,
        ignore_index: int,
        vocab_size: int,
        validate: bool,
        agreement: Agreement | None = None,
    ) -> None:
        self._call, self._agreement = (labels, temperature, ignore_index, vocab_size), agreement
        asked = validate and labels.shape[0] > 0
        self._known = None if asked else labels.shape[0]
        self._copied: torch.cuda.Event | None = None
        if not asked and agreement is None:
            return
        self._facts = value_facts(labels, temperature, ignore_index) if asked else labels.new_zeros(3)
        self._on_host = self._facts if agreement is None else agreement.gather(self._of_rank())
        if labels.is_cuda:
            on_device = self._on_host
            self._on_host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            self._on_host.copy_(on_device, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(labels.device))
        if agreement is not None:  # no rank may go on to a collective whose sizes the others do not share
            self._read()

    def _of_rank(self) -> Tensor:
        """[6] what `FACTS` names; the values of ignored tokens are nobody's."""
        labels, temperature, ignore_index, _ = self._call
        live = labels != ignore_index
        # By place, so that the same tokens in another order differ; cubed, since masks of as many tokens often have
        # equal sums of places.
        place = torch.arange(1, labels.numel() + 1, device=labels.device).view(labels.shape)
        of_labels = torch.where(live, (labels + 1) * place.pow(3), 0).sum()
        of_temperatures = torch.zeros_like(of_labels)
        if temperature is not None:
            live = live.any(1) if live.ndim == 2 else live
            used = torch.where(live, temperature, 0.0).double() * place.flatten()[: live.shape[0]]
            of_temperatures = used.sum().view(torch.int64)
        facts = torch.nn.functional.pad(self._facts, (0, 4 - self._facts.shape[0]))
        return torch.cat((facts, torch.stack((of_labels, of_temperatures))))

    @property
    def on_device(self) -> Tensor | None:
        """[] int64, how many are live, where the host does not know it yet and can go on without."""
        return self._facts[0] if self._copied is not None and self._known is None else None

    def _read(self) -> None:
        """Wait for the device, and check what it says."""
        if self._copied is not None:
            self._copied.synchronize()
        facts = self._on_host.tolist()
        if self._agreement is not None:
            facts = self._agreement.checked(facts, FACTS, self._call[0].device)[: self._facts.shape[0]]
        if self._known is None:
            self._known = check_facts(facts, *self._call)

    @property
    def count(self) -> int:
        """How many are live; waits for the device, and raises if a label or a temperature is out of range."""
        if self._known is None:
            self._read()
        assert self._known is not None
        return self._known

    def settle(self) -> None:
        """Wait, and raise `SomeIgnored` where some are."""
        if self.indices is not None:
            raise SomeIgnored

    @cached_property
    def indices(self) -> Tensor | None:
        """[n] ascending indices of the live tokens; None where all are."""
        labels, _, ignore_index, _ = self._call
        if self.count == labels.shape[0]:
            return None
        live = labels != ignore_index
        return torch.nonzero_static(live.any(1) if live.ndim == 2 else live, size=self.count).squeeze(1)
