"""Killing a run of `logitless score`, and what must be there when it has been resumed until it is done."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil

__all__ = ["PATIENCE", "check", "kill", "rows"]

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
PATIENCE = 600  # seconds; a run that takes longer hangs


def rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return list(pq.read_table(path).to_pylist())
    return [json.loads(line) for line in path.read_text().splitlines()]


def made(path: Path) -> set[str]:
    """What a run has left beside its output, by the ends of the names."""
    return {file.name.removeprefix(path.name) for file in path.parent.iterdir() if file.name.startswith(path.name)}


def check(path: Path, whole: Path) -> None:
    """The output of a run that was killed is the one of a run that was not."""
    got, expected = rows(path), rows(whole)
    assert [row["record"] for row in got] == list(range(len(expected)))
    assert got == expected
    assert made(path) == made(whole)
    if path.suffix == ".jsonl":
        metas = [json.loads(Path(f"{one}.meta.json").read_text()) for one in (path, whole)]
        assert metas[0]["run"] == metas[1]["run"]
    reports = [json.loads(Path(f"{one}.mismatch.json").read_text()) for one in (path, whole)]
    assert reports[0] == reports[1]


def kill(pids: list[int], rng: random.Random, began: float, delay: float) -> str | None:
    """Send a signal to one of the processes after a delay; None if they ended before."""
    while time.monotonic() - began < delay:
        if all(not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids):
            return None
        time.sleep(0.002)
    chosen = rng.choice(SIGNALS)
    try:
        os.kill(rng.choice(pids), chosen)
    except ProcessLookupError:
        return None
    return chosen.name
