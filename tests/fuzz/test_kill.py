"""`logitless score`, killed at any moment and resumed until it is done: not one record lost, doubled or changed.

The moments are random, as is the signal; and for a small run every change of the file system in turn.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from common import KILLS, SEED, TALLY
from killing import PATIENCE, check, kill, rows

FEW = KILLS < 50
minutes = pytest.mark.skipif(FEW, reason="takes minutes: nox -s fuzz")


class ForkServer:
    """Children of one process that has imported everything; see fork_server.py."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "child"
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        assert self.read() == "ready"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def start(self, *arguments: object, ranks: int = 1, die_at: int | None = None, watch: str = "") -> list[int]:
        """The pids of the command's ranks."""
        jobs = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
            env = {name: str(value) for name, value in place.items()} | {"MASTER_PORT": port}
            job = {"argv": list(map(str, arguments)), "env": env, "log": f"{self.log}.{rank}"}
            jobs.append(job | {"die_at": die_at, "watch": watch})
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jobs": jobs}) + "\n")
        self.process.stdin.flush()
        pids: list[int] = json.loads(self.read())["pids"]
        return pids

    def wait(self) -> list[int]:
        """Their exit codes, once all have ended."""
        codes: list[int] = json.loads(self.read())["codes"]
        return codes

    def said(self, ranks: int = 1) -> str:
        return "".join(Path(f"{self.log}.{rank}").read_text() for rank in range(ranks))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("server"))
    yield server
    server.process.kill()
    server.process.wait()


@pytest.mark.parametrize(
    ("suffix", "ranks", "share"),
    [
        (".jsonl", 1, 0.35),
        pytest.param(".parquet", 1, 0.35, marks=minutes),
        pytest.param(".jsonl", 2, 0.15, marks=minutes),
        pytest.param(".parquet", 2, 0.15, marks=minutes),
    ],
)
def test_killed_at_random_moments(
    server: ForkServer, options: list[Any], tmp_path: Path, suffix: str, ranks: int, share: float
) -> None:
    """So many kills, over as many outputs as that takes, each resumed until it is done."""
    whole = tmp_path / f"whole{suffix}"
    began = time.monotonic()
    server.start(*options, "--output", whole, ranks=ranks)
    assert server.wait() == [0] * ranks, server.said()
    longest = time.monotonic() - began

    rng = random.Random(f"{SEED} {suffix} {ranks}")
    area = f"kill and resume, {suffix}, {ranks} rank{'s' * (ranks > 1)}"
    wanted = max(1, round(KILLS * share))
    kills = 0
    for run in range(1000):
        path = tmp_path / f"killed{run}{suffix}"
        codes = [1]
        while any(codes):
            began = time.monotonic()
            pids = server.start(*options, "--output", path, "--resume", ranks=ranks)
            sent = kill(pids, rng, began, rng.uniform(0, longest)) if kills < wanted else None
            codes = server.wait()
            assert time.monotonic() - began < PATIENCE
            said = server.said(ranks)
            if sent is None:
                assert codes == [0] * ranks, said
            elif any(codes):
                kills += 1
                parts = len(list(Path(f"{path}.parts").glob("part-*")))
                state = "output there" if path.exists() else "some parts there" if parts else "no part there"
                TALLY.told(area, f"{sent}, {state}")
                assert "Traceback" not in said, said
            if path.exists():
                assert rows(path) == rows(whole)
        check(path, whole)
        TALLY.right(area)
        if kills >= wanted:
            break


@pytest.mark.parametrize(
    ("suffix", "replaced"),
    [
        (".parquet", False),
        pytest.param(".jsonl", False, marks=minutes),
        pytest.param(".parquet", True, marks=minutes),
        pytest.param(".jsonl", True, marks=minutes),
    ],
)
def test_killed_before_each_change_of_a_file(
    server: ForkServer, options: list[Any], tmp_path: Path, suffix: str, replaced: bool
) -> None:
    """It dies once before each step that a small run makes on the disk; by default before every eleventh."""
    options = [*options, "--records-per-part", 24]
    whole, other = tmp_path / f"whole{suffix}", tmp_path / f"other{suffix}"
    for path, temperature in ((whole, 1.0), (other, 0.5)):
        server.start(*options, "--output", path, "--temperature", temperature, "--rollout-logprobs", "raw")
        assert server.wait() == [0], server.said()
    options = [*options, "--rollout-logprobs", "raw"]
    area = f"killed before each change of a file, {suffix}, {'over an older output' if replaced else 'new output'}"
    old = rows(other)
    for number in range(0, 1000, 11 if FEW else 1):
        path = tmp_path / f"killed{number}{suffix}"
        for end in ("", ".meta.json", ".mismatch.json", ".mismatch.png") if replaced else ():
            if Path(f"{other}{end}").exists():
                os.link(f"{other}{end}", f"{path}{end}")
        flag = ["--overwrite"] if replaced else []
        server.start(*options, "--output", path, *flag, die_at=number, watch=str(path))
        if server.wait() == [0]:
            assert number > 11
            break
        if path.exists():
            assert rows(path) in (rows(whole), old)
        server.start(*options, "--output", path, "--resume")
        if server.wait() != [0]:  # before the folder was claimed the older output stands, and is of another run
            assert replaced, server.said()
            assert "is of another run" in server.said()
            assert rows(path) == old
            TALLY.told(area, "the older output stands as it was, and --resume says that it is of another run")
            continue
        check(path, whole)
        TALLY.right(area)
    else:
        pytest.fail("the run never ended")
