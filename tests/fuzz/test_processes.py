"""`logitless score` as a user starts it, also under torchrun, killed and resumed: as test_kill.py, at full price."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from common import KILLS, SEED, TALLY
from killing import PATIENCE, check, kill


def manifest(path: Path) -> bytes:
    """That of the run under way, which bears an id of its own."""
    try:
        return Path(f"{path}.parts/manifest.json").read_bytes()
    except FileNotFoundError:
        return b""


@pytest.mark.skipif(KILLS < 12, reason="takes minutes: nox -s fuzz")
@pytest.mark.parametrize(("suffix", "ranks"), [(".jsonl", 0), (".parquet", 0), (".parquet", 2)])
def test_processes_killed_at_random_moments(
    commands: Any, options: list[Any], tmp_path: Path, suffix: str, ranks: int
) -> None:
    """The clock runs from when the run has claimed its folder: what dies before has done nothing."""
    options, wanted = options[1:], KILLS // 12
    whole = tmp_path / f"whole{suffix}"
    began = time.monotonic()
    assert commands.run(*options, "--output", whole, torchrun=ranks).returncode == 0
    rng, longest = random.Random(f"{SEED} process {suffix} {ranks}"), (time.monotonic() - began) / 4
    area = f"processes, {suffix}, " + (f"torchrun with {ranks} ranks" if ranks else "one process")
    kills = 0
    for run in range(100):
        path = tmp_path / f"killed{run}{suffix}"
        code = 1
        while code:
            before = manifest(path)
            with commands.start(*options, "--output", path, "--resume", torchrun=ranks) as process:
                sent, pids = None, [process.pid]
                if kills < wanted:
                    while process.poll() is None and manifest(path) in (before, b""):
                        time.sleep(0.002)
                    pids += [child.pid for child in psutil.Process(process.pid).children()] if ranks else []
                    sent = kill(pids, rng, time.monotonic(), rng.uniform(0, longest))
                _, said = process.communicate(timeout=PATIENCE)
                code = process.returncode
            while any(psutil.pid_exists(pid) for pid in pids):  # an agent that is killed leaves its ranks, which end
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
