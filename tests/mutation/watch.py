"""A pytest plugin: how long each test takes, and which of them start processes, where coverage does not follow.

`LOGITLESS_WATCH` names the JSON file that it writes.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

SECONDS: dict[str, float] = defaultdict(float)
STARTING: set[str] = set()
_current: list[str] = []


def _note(event: str, _: Any) -> None:
    if _current and event in ("os.fork", "os.posix_spawn", "subprocess.Popen"):
        STARTING.add(_current[-1])


def pytest_configure() -> None:
    sys.addaudithook(_note)


def pytest_runtest_logstart(nodeid: str) -> None:
    _current[:] = [nodeid]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    SECONDS[report.nodeid] += report.duration


def pytest_sessionfinish() -> None:
    found = {"seconds": SECONDS, "starting": sorted(STARTING)}
    Path(os.environ["LOGITLESS_WATCH"]).write_text(json.dumps(found), "utf-8")
