"""Runs the fuzz tests at length and writes docs/fuzz.md.

    python tests/fuzz/run.py [--examples 1000] [--kills 50] [--seed N] [MODULE ...]

Each module's figures are kept in tests/fuzz/ran.json until it runs again. The exit code is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import SEED

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORD = HERE / "ran.json"
MODULES = ("records", "resume", "kill", "processes", "settings", "options")
PACKAGES = ("torch", "transformers", "tokenizers", "pyarrow", "hypothesis")
TITLE = """# Fuzzing

Written by `nox -s fuzz`. Inputs are made by hypothesis and from random seeds; every one must end in the right result,
which is compared with an independent one, or in an error of ours that names the line, the file or the argument. What
fails a test: a traceback from deep inside, a record that is skipped, doubled or of another value, a file that is lost.
A short slice of the same tests, from the same seed, runs at every change.
"""


def run(module: str, examples: int, kills: int, seed: int) -> dict[str, Any]:
    """One module's tests: when, in what, and its tally."""
    report = HERE / f".report-{module}.json"
    env = {"LOGITLESS_FUZZ_EXAMPLES": examples, "LOGITLESS_FUZZ_KILLS": kills, "LOGITLESS_FUZZ_SEED": seed}
    env |= {"LOGITLESS_FUZZ_REPORT": report, "OMP_NUM_THREADS": 1}
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", str(HERE / f"test_{module}.py")]
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, **{k: str(v) for k, v in env.items()}}).returncode
    commit = ["git", "rev-parse", "--short", "HEAD"]
    ran = {
        "passed": code == 0,
        "seconds": round(time.monotonic() - began),
        "seed": seed,
        "commit": subprocess.run(commit, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "areas": json.loads(report.read_text()),
    }
    report.unlink()
    return ran


def table(ran: dict[str, Any]) -> list[str]:
    lines = ["| what | ended | right results | errors told | distinct |", "|---|---|---|---|---|"]
    for area, found in ran["areas"].items():
        told = sum(found["errors"].values())
        lines.append(f"| {area} | {found['right'] + told} | {found['right']} | {told} | {len(found['errors'])} |")
    return lines


def kills(ran: dict[str, Any]) -> list[str]:
    """How often each signal hit, and what was there: these are told as errors of an area."""
    lines = [
        "Each output is killed again and again, and resumed until it is done; the second column counts those that",
        "ended with the exact scores, the others what stopped them and what lay there. Of deaths before each change of",
        "a file every one is counted, and those that could not be resumed, since an older output was there, as it was.",
        "",
        "| what | ended with the exact scores | stops | of which |",
        "|---|---|---|---|",
    ]
    for area, found in ran["areas"].items():
        stopped = ", ".join(f"{count} × {what}" for what, count in sorted(found["errors"].items()))
        lines.append(f"| {area} | {found['right']} | {sum(found['errors'].values())} | {stopped} |")
    return lines


def page(record: dict[str, Any]) -> str:
    """docs/fuzz.md."""
    lines = [TITLE]
    for module in MODULES:
        ran = record.get(module)
        lines += [f"## {module.capitalize()}", ""]
        if ran is None:
            lines += ["Not run.", ""]
            continue
        where = ", ".join(f"{name} {number}" for name, number in ran["versions"].items())
        verdict = "All passed" if ran["passed"] else "**Failed**"
        about = f"{ran['date']}, commit {ran['commit']}, seed {ran['seed']}, {ran['seconds']} s; {where}."
        lines += [f"{verdict}. {about}", "", *(kills if module in ("kill", "processes") else table)(ran), ""]
    return "\n".join([*lines, (HERE / "found.md").read_text()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000, help="of a property of weight 1")
    parser.add_argument("--kills", type=int, default=50, help="50 or more run the tests that take minutes")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("modules", nargs="*", default=MODULES, help=f"some of {', '.join(MODULES)}")
    asked = parser.parse_args()
    good = True
    for module in asked.modules:
        ran = run(module, asked.examples, asked.kills, asked.seed)
        good &= ran["passed"]
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        record[module] = ran
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        (ROOT / "docs/fuzz.md").write_text(page(record))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
