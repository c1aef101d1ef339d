"""The command as a user starts it: a process of its own."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from logitless.errors import NotFoundError
from logitless_hf.score.command import score

Write = Callable[..., Path]
Varied = Callable[[int], list[dict[str, Any]]]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_killed_run_is_resumed_to_the_same_bytes(
    commands: Any, write: Write, varied: Varied, checkpoint: Path, tmp_path: Path
) -> None:
    records = write(*varied(400))
    arguments = ["--model", checkpoint, "--input", records, "--records-per-part", 1, "--device", "cpu"]
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    ran = commands.run(*arguments, "--output", whole)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""
    assert ran.stderr.startswith(f"{whole}: 400 records, ")  # and no progress bar without a terminal
    assert ran.stderr.count("\n") == 1

    parts = Path(f"{killed}.parts")
    with commands.start(*arguments, "--output", killed) as process:
        until = time.monotonic() + 120
        while len(list(parts.glob("part-*.jsonl"))) < 3 and time.monotonic() < until:
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not killed.exists()
    done = len(list(parts.glob("part-*.jsonl")))
    assert 3 <= done < 400

    resumed = commands.run(*arguments, "--output", killed, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert f"{done} of them scored earlier" in resumed.stderr
    assert killed.read_bytes() == whole.read_bytes()
    assert files(tmp_path) == {p.name + end for p in (whole, killed) for end in ("", ".meta.json")} | {records.name}


def test_two_ranks_write_what_one_writes(
    commands: Any, write: Write, varied: Varied, checkpoint: Path, tmp_path: Path
) -> None:
    records = write(*varied(23))
    arguments = ["--model", checkpoint, "--input", records, "--records-per-part", 4, "--device", "cpu"]
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    assert commands.run(*arguments, "--output", one).returncode == 0
    ran = commands.run(*arguments, "--output", two, torchrun=2)
    assert ran.returncode == 0, ran.stderr
    assert two.read_bytes() == one.read_bytes()
    metas = [json.loads(Path(f"{path}.meta.json").read_text()) for path in (one, two)]
    assert [meta.pop("ranks") for meta in metas] == [1, 2]
    assert metas[0] == metas[1]
    assert not Path(f"{two}.parts").exists()


def test_a_rank_that_fails_fails_all(
    commands: Any, write: Write, varied: Varied, checkpoint: Path, tmp_path: Path
) -> None:
    records = write(*varied(5), {"prompt": "a"})  # in rank 1's share
    arguments = ["--model", checkpoint, "--input", records, "--output", tmp_path / "scores.jsonl", "--device", "cpu"]
    ran = commands.run(*arguments, "--records-per-part", 4, torchrun=2)
    assert ran.returncode != 0
    reason = f'{records}, line 6 (record 5): the field "completion" is missing'
    assert f"error: {reason}" in ran.stderr
    assert f"rank 0 of 2 stopped, because rank 1 failed: {reason}" in ran.stderr
    assert files(tmp_path) == {records.name}


def test_a_bad_command_fails_with_its_reason_and_no_traceback(
    commands: Any, write: Write, varied: Varied, checkpoint: Path, tmp_path: Path
) -> None:
    records = write(*varied(2))
    arguments = ["--model", "org/name-on-a-hub", "--input", records, "--output", tmp_path / "scores.jsonl"]
    ran = commands.run(*arguments)
    assert ran.returncode == 1
    assert "no model hub is ever contacted" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_environment_names_a_backend(
    write: Write, varied: Varied, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGITLESS_BACKEND", "abacus")
    app = typer.Typer()
    app.command()(score)
    arguments = ["--model", checkpoint, "--input", write(*varied(2)), "--output", tmp_path / "scores.jsonl"]
    ran = CliRunner().invoke(app, list(map(str, arguments)))
    assert isinstance(ran.exception, NotFoundError)
    assert "--backend: got 'abacus'" in str(ran.exception)
