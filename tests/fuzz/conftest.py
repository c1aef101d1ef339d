"""The tiny checkpoint of the tests of `logitless score`, and the tally written where LOGITLESS_FUZZ_REPORT says."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from common import TALLY, tiny

SCORE = tiny()
REPORT = os.environ.get("LOGITLESS_FUZZ_REPORT")  # read now: the tests run without such settings
checkpoint, write, varied, commands = SCORE.checkpoint, SCORE.write, SCORE.varied, SCORE.commands


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    if REPORT:
        Path(REPORT).write_text(json.dumps(TALLY.as_json(), indent=1) + "\n")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LOGITLESS_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def options(checkpoint: Path, write: Callable[..., Path], varied: Callable[[int], list[dict[str, Any]]]) -> list[Any]:
    """Of a run of 48 records in 24 parts, some with a rollout's log-probs."""
    records = varied(48)
    for i in range(2, 48, 3):
        scored = len(records[i]["input_ids"]) - records[i]["prompt_length"]
        records[i]["logprobs"] = [-0.25 * (1 + n % 5) for n in range(scored)]
    given: dict[str, Any] = {"model": checkpoint, "input": write(*records), "records-per-part": 2, "device": "cpu"}
    return ["score", *(word for name, value in given.items() for word in (f"--{name}", value))]
