"""Plants faults in core and both backends and counts those that their tests catch; writes docs/mutation.md.

cosmic-ray says what can be changed and changes it; here are only the sample, the choice of tests and the report. The
mutants are planted in copies of the tree, never in the checkout. All that was found is kept in the work folder, so
that a run that was broken off goes on, and so that a survivor can be tried again once there is a test for it.

    python tests/mutation/run.py --work FOLDER [--count 200] [--jobs 2] [--part core] [--again TEXT] [--report]

The exit code is 1 if fewer than 95 % were killed of those that are not equivalent, or a survivor is not explained in
explained.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from coverage_map import CoverageMap, statement
from mutants import Mutant, draw, mutated, places
from report import page, score
from trial import Tried, try_tests

ROOT = Path(__file__).parents[2]
PACKAGES = ("core", "backend-torch", "backend-triton")
SOURCES = [f"packages/{name}/src" for name in PACKAGES]
SEED = 20261130
# Seconds, as measured, of a package's tests: in the first round, which kills most, and at most in the second.
FIRST, SECOND = 20.0, 1200.0
PATIENCE = 5  # times a test's usual time, and a minute, before a mutant counts as endless


def _copy(target: Path) -> None:
    """The working tree's packages and settings at `target`, where mutants are planted."""
    for name in PACKAGES:
        for part in ("src", "tests"):
            shutil.rmtree(target / f"packages/{name}/{part}", ignore_errors=True)
            shutil.copytree(ROOT / f"packages/{name}/{part}", target / f"packages/{name}/{part}")
    shutil.copy(ROOT / "pyproject.toml", target)


def _digest() -> str:
    files = sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
    return sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _sample(work: Path, count: int, report: bool) -> dict[str, Any]:
    """The sample and what it was drawn from; drawn once for a work folder, and on, if more are asked for.

    Only a report may be made of sources that are others by now: it says so.
    """
    file = work / "sample.json"
    if not file.exists() or (not report and len(json.loads(file.read_text("utf-8"))["mutants"]) < count):
        print("listing all places ...", flush=True)
        population = places(ROOT, SOURCES)
        mutants, passed_over = draw(ROOT, population, count, SEED)
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        found = {
            "commit": commit.stdout.strip(),
            "digest": _digest(),
            "seed": SEED,
            "places": len(population),
            "choices": sum(map(len, population.values())),
            "passed_over": passed_over,
            "mutants": [asdict(mutant) for mutant in mutants],
        }
        file.write_text(json.dumps(found, indent=1), "utf-8")
    found = json.loads(file.read_text("utf-8"))
    if found["digest"] != _digest() and not report:
        raise SystemExit(f"the sources are not those that {file} was drawn from: go back to them or empty {work}")
    return dict(found)


def _measured(work: Path, names: Iterable[str]) -> dict[str, CoverageMap]:
    """What each package's tests run, and how long that takes; measured once for a work folder."""
    maps = {}
    for name in names:
        copy = work / f"map-{name}"
        if not (work / f"{name}.json").exists():
            print(f"measuring the tests of {name} ...", flush=True)
            _copy(copy)
            path = os.pathsep.join([str(Path(__file__).parent), *(str(copy / folder) for folder in SOURCES)])
            env = {"PYTHONPATH": path, "COVERAGE_FILE": str(work / f"{name}.coverage"), "COVERAGE_CORE": "ctrace"}
            env["LOGITLESS_WATCH"] = str(work / f"{name}.watch")
            options = [*(f"--cov={copy / folder}" for folder in SOURCES), "--cov-context=test", "--cov-report="]
            command = [sys.executable, "-m", "pytest", "-q", "-p", "watch", *options, f"packages/{name}/tests"]
            subprocess.run(command, cwd=copy, env={**os.environ, **env}, check=True)
            (work / f"{name}.watch").rename(work / f"{name}.json")  # now it is whole
        maps[name] = CoverageMap(copy, work / f"{name}.coverage", work / f"{name}.json")
    return maps


def _changed(copy: Path, work: Path, name: str) -> set[str]:
    """The test files of a package that are not as they were when its tests were measured."""
    old = work / f"map-{name}"
    files = {str(path.relative_to(copy)) for path in (copy / f"packages/{name}/tests").rglob("test_*.py")}
    return {
        path for path in files if not (old / path).exists() or (old / path).read_bytes() != (copy / path).read_bytes()
    }


def _plant(copy: Path, path: str, text: str) -> None:
    (copy / path).write_text(text, "utf-8")
    for compiled in (copy / path).parent.glob(f"__pycache__/{Path(path).stem}.*"):
        compiled.unlink()  # Python tells a stale one by size and time in seconds, and a mutant may have both


def _try(work: Path, maps: dict[str, CoverageMap], first: bool, at: int, mutant: Mutant) -> tuple[int, Tried, int]:
    """Plants a mutant and runs tests until one fails: in the first round its package's fastest, then all the others."""
    copy = work / f"copy-{os.getpid()}"
    if not copy.exists():
        _copy(copy)
    original = (ROOT / mutant.path).read_text("utf-8")
    span = statement(original, mutant.line)
    met = 0
    tried = Tried("passed")
    _plant(copy, mutant.path, mutated(ROOT, mutant.path, mutant.operator, mutant.occurrence))
    try:
        for name, covered in maps.items():
            own = name == _package(mutant)
            tests, rest = covered.split(mutant.path, span, FIRST if own else 0.0, SECOND)
            files = _changed(copy, work, name) if first == own else set()
            tests = (tests if own else []) if first else rest
            if tests or files:
                limit = 60 + PATIENCE * sum(covered.seconds[test] for test in tests)
                tried = try_tests(copy, SOURCES, tests, set(covered.seconds), files, limit)
                met += len(tests)
            if tried.ending != "passed":
                break
    finally:
        _plant(copy, mutant.path, original)
    return at, tried, met


def _package(mutant: Mutant) -> str:
    return mutant.path.split("/")[1]


def _round(work: Path, jobs: int, first: bool, todo: dict[int, Mutant], results: dict[str, Any]) -> None:
    names = dict.fromkeys(_package(mutant) for mutant in todo.values()) if first else PACKAGES
    maps = _measured(work, names)
    # Not multiprocessing.Pool: its workers are daemons, and such a process may not start the ranks that tests need.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        for done in as_completed([pool.submit(_try, work, maps, first, *numbered) for numbered in todo.items()]):
            at, tried, met = done.result()
            before = results.get(str(at), {"tests": 0})
            ending = "alive" if tried.ending == "passed" and first else tried.ending
            results[str(at)] = {**asdict(tried), "ending": ending, "tests": before["tests"] + met}
            (work / "results.json").write_text(json.dumps(results, indent=1), "utf-8")
            mutant = todo[at]
            print(f"{len(results)} {ending:10s} {mutant.path}:{mutant.line} {mutant.diff} | {tried.by}", flush=True)


def _control(work: Path, results: dict[str, Any]) -> None:
    """The tests that killed have to pass where nothing is planted: else it was not the mutant that they failed of."""
    copy = work / "copy-control"
    _copy(copy)
    killers = {result["by"] for result in results.values() if result["ending"] == "failed"}
    for name in PACKAGES:
        tests = sorted(test for test in killers if test.startswith(f"packages/{name}/"))
        if tests:
            tried = try_tests(copy, SOURCES, tests, None, set(), 60.0 * len(tests))
            if tried.ending != "passed":
                raise SystemExit(f"without any mutant: {tried.ending} {tried.by}: {tried.why}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="keeps the copies, the sample and the results")
    parser.add_argument("--count", type=int, default=200, help="mutants to draw")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--part", choices=PACKAGES, help="only this package's mutants")
    parser.add_argument("--again", help="try once more the survivors whose file, function or change contains this")
    parser.add_argument("--report", action="store_true", help="only write the page, from what was found")
    asked = parser.parse_args()
    work: Path = asked.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    sample = _sample(work, asked.count, asked.report)
    mutants = [Mutant(**fields) for fields in sample["mutants"]]
    results_file = work / "results.json"
    results: dict[str, Any] = json.loads(results_file.read_text("utf-8")) if results_file.exists() else {}
    explained, gaps = (
        json.loads((Path(__file__).parent / name).read_text("utf-8")) for name in ("explained.json", "gaps.json")
    )
    if asked.again is not None:
        again = [
            key
            for key, r in results.items()
            if r["ending"] in ("passed", "alive") and asked.again in mutants[int(key)].key
        ]
        results = {key: result for key, result in results.items() if key not in again}
    if not asked.report:
        for folder in work.glob("copy-*"):
            shutil.rmtree(folder)
        chosen = {at: m for at, m in enumerate(mutants) if asked.part in (None, _package(m))}
        _round(work, asked.jobs, True, {at: m for at, m in chosen.items() if str(at) not in results}, results)
        # What is explained cannot be told from the original, so that more tests would not tell it either.
        alive = {at: m for at, m in chosen.items() if results[str(at)]["ending"] == "alive" and m.key not in explained}
        _round(work, asked.jobs, False, alive, results)
        _control(work, results)
    (ROOT / "docs/mutation.md").write_text(page(sample, mutants, results, explained, SECOND, gaps), "utf-8")
    killed, unexplained = score(mutants, results, explained)
    print(f"{killed:.1%} killed of what is not equivalent; {unexplained} survivors not explained")
    return int(killed < 0.95 or unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
