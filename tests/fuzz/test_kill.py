"""`logitless score`, killed at any moment and resumed until it is done: not one record lost, doubled or changed.

The moments are random, as is the signal; and for a small run every change of the file system in turn.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from common import KILLS, SEED, TALLY

FEW = KILLS < 50
minutes = pytest.mark.skipif(FEW, reason="takes minutes: nox -s fuzz")
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
PATIENCE = 600  # seconds; a run that takes longer hangs


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


@pytest.fixture
def options(checkpoint: Path, write: Callable[..., Path], varied: Callable[[int], list[dict[str, Any]]]) -> list[Any]:
    """Of a run of 48 records in 24 parts, some with a rollout's log-probs."""
    records = varied(48)
    for i in range(2, 48, 3):
        scored = len(records[i]["input_ids"]) - records[i]["prompt_length"]
        records[i]["logprobs"] = [-0.25 * (1 + n % 5) for n in range(scored)]
    given: dict[str, Any] = {"model": checkpoint, "input": write(*records), "records-per-part": 2, "device": "cpu"}
    return ["score", *(word for name, value in given.items() for word in (f"--{name}", value))]


def rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
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


@minutes
@pytest.mark.parametrize(("suffix", "ranks", "wanted"), [(".jsonl", 0, 4), (".parquet", 0, 4), (".parquet", 2, 4)])
def test_real_processes_killed_at_random_moments(
    commands: Any, options: list[Any], tmp_path: Path, suffix: str, ranks: int, wanted: int
) -> None:
    """`logitless` itself, and under torchrun; the clock runs from when the folder of parts is there."""
    options = options[1:]
    whole = tmp_path / f"whole{suffix}"
    assert commands.run(*options, "--output", whole, torchrun=ranks).returncode == 0
    rng = random.Random(f"{SEED} real {suffix} {ranks}")
    area = f"kill and resume, real processes, {suffix}, " + (f"torchrun, {ranks} ranks" if ranks else "1 process")
    kills = 0
    for run in range(100):
        path = tmp_path / f"killed{run}{suffix}"
        code = 1
        while code:
            with commands.start(*options, "--output", path, "--resume", torchrun=ranks) as process:
                sent = None
                if kills < wanted:
                    while process.poll() is None and not Path(f"{path}.parts").exists():
                        time.sleep(0.002)
                    workers = [child.pid for child in psutil.Process(process.pid).children()] if ranks else []
                    sent = kill([process.pid, *workers], rng, time.monotonic(), rng.uniform(0, 1.0))
                _, said = process.communicate(timeout=PATIENCE)
                code = process.returncode
            for pid in workers if sent else ():  # an agent that is killed leaves its ranks, which end by themselves
                while psutil.pid_exists(pid):
                    time.sleep(0.01)
            if sent is None:
                assert code == 0, said
            elif code:
                kills += 1
                TALLY.told(area, f"{sent}, {'output there' if path.exists() else 'no output there'}")
                assert ranks or "Traceback" not in said, said
        check(path, whole)
        TALLY.right(area)
        if kills >= wanted:
            break
