"""The mismatch report of a run: rows in as they are merged, the files beside the output out."""

from __future__ import annotations

import io
import json
from typing import Any

import torch

from logitless.mismatch import Mismatch, rollout_mismatch
from logitless_hf.mismatch import can_plot, plot_mismatch

__all__ = ["REPORT_SUFFIXES", "MismatchReport"]

REPORT_SUFFIXES = (".mismatch.json", ".mismatch.png")
_FLUSH = 1 << 16  # tokens summed at once
_POINTS = 20_000  # tokens in the picture, about: evenly taken from all


class MismatchReport:
    """Sums over all tokens, the worst of them, and an even sample for the picture.

    Args:
        about: what the report states beside the numbers.
    """

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        self.records = self.without = 0
        self.worst: dict[str, Any] | None = None
        self._sums = Mismatch()
        self._pending: list[tuple[float, float]] = []  # (here, rollout) of each token
        self._sample: list[tuple[float, float]] = []
        self._seen, self._stride = 0, 1

    def see(self, row: dict[str, Any]) -> None:
        """Take in one record's row."""
        if row["rollout_log_probs"] is None:
            self.without += 1
            return
        self.records += 1
        rollout, deltas = row["rollout_log_probs"], row["rollout_delta"]
        pairs = [(a + delta, a) for a, delta in zip(rollout, deltas, strict=True)]
        at = max(range(len(deltas)), key=lambda i: abs(deltas[i]))
        if self.worst is None or abs(deltas[at]) > abs(self.worst["delta"]):
            names = ("token_ids", "tokens", "rollout_log_probs", "rollout_delta")
            values = dict(
                zip(("token_id", "token", "rollout_log_prob", "delta"), (row[n][at] for n in names), strict=True)
            )
            self.worst = {"record": row["record"], "position": at, **values}
        self._sample += pairs[-self._seen % self._stride :: self._stride]
        self._seen += len(pairs)
        while len(self._sample) > 2 * _POINTS:
            self._sample, self._stride = self._sample[::2], self._stride * 2
        self._pending += pairs
        if len(self._pending) >= _FLUSH:
            self._flush()

    @property
    def mismatch(self) -> Mismatch:
        """Over the rows seen so far."""
        self._flush()
        return self._sums

    def files(self) -> dict[str, bytes]:
        """The report by the end of its file's name; no picture without matplotlib."""
        report = {
            **self.about,
            "records": self.records,
            "records_without_logprobs": self.without,
            **self.mismatch.to_dict(),
            "worst_token": self.worst,
        }
        files = {".mismatch.json": (json.dumps(report, indent=2, allow_nan=False) + "\n").encode()}
        if can_plot():
            here, rollout = torch.tensor(self._sample, dtype=torch.float64).view(-1, 2).unbind(1)
            picture = io.BytesIO()
            plot_mismatch(here, rollout, picture, of=self.mismatch)
            files[".mismatch.png"] = picture.getvalue()
        return files

    def _flush(self) -> None:
        if self._pending:
            here, rollout = torch.tensor(self._pending, dtype=torch.float64).unbind(1)
            self._sums += rollout_mismatch(here, rollout)
            self._pending = []
