"""The tiny checkpoint of the tests of `logitless score`, and the tally written where LOGITLESS_FUZZ_REPORT says."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from common import TALLY, tiny

SCORE = tiny()
checkpoint, write, varied, commands = SCORE.checkpoint, SCORE.write, SCORE.varied, SCORE.commands


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    report = os.environ.get("LOGITLESS_FUZZ_REPORT")
    if report:
        Path(report).write_text(json.dumps(TALLY.as_json(), indent=1) + "\n")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LOGITLESS_")]:
        monkeypatch.delenv(name)
