from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from logitless_hf.score.claim import hold


def test_one_holds_at_a_time(tmp_path: Path) -> None:
    first = hold(tmp_path / "lock")
    assert first is not None
    assert hold(tmp_path / "lock") is None
    first.close()
    second = hold(tmp_path / "lock")
    assert second is not None
    second.close()


def test_a_file_taken_away_before_it_is_locked_is_not_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, path = fcntl.flock, tmp_path / "lock"
    left = [lambda: path.unlink(), lambda: (path.unlink(), path.touch())]

    def late(*arguments: Any) -> None:
        flock(*arguments)
        if left:
            left.pop()()

    monkeypatch.setattr(fcntl, "flock", late)
    held = hold(path)
    assert held is not None
    assert left == []
    assert hold(path) is None
    held.close()
