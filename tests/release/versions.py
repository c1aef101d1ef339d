"""The table of supported versions, docs/versions.md, from what `nox -s compat` ran.

    python tests/release/versions.py NAME JUNIT.xml    records a combination's run, in the venv that ran it
    python tests/release/versions.py                   writes the page anew

The exit code is 1 if the run had failures.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["counts", "page", "ran"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHOWN = ("torch", "transformers", "triton", "megatron-core")
TITLE = """# Supported versions

What the packages state, and what was run. Each line of the table was written by `nox -s "compat(NAME)"` when it ended:
the tests of one package, with core and, for an adapter, the torch backend, on a machine without a GPU.
"""


def counts(junit: Path) -> dict[str, int]:
    """Passed, failed and skipped tests of a run."""
    found = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in ElementTree.parse(junit).getroot().iter("testsuite"):
        for name in found:
            found[name] += int(suite.attrib[name])
    failed = found["failures"] + found["errors"]
    return {"passed": found["tests"] - failed - found["skipped"], "failed": failed, "skipped": found["skipped"]}


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def ran(junit: Path) -> dict[str, Any]:
    """What is known of a run: in which versions, at which commit, how it ended."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    versions = {name: installed(name) for name in SHOWN}
    today = datetime.now(timezone.utc).date().isoformat()
    return {"python": platform.python_version(), **versions, **counts(junit), "date": today, "commit": commit}


def stated() -> list[str]:
    """A line for each package: what its metadata asks for."""
    lines = []
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        others = [*project["dependencies"], *project.get("optional-dependencies", {}).get("mcore", [])]
        wanted = [item for item in others if item.split(";")[0].split("[")[0].rstrip("<>=.,0123456789 ") in SHOWN]
        lines.append(f"| `{project['name']}` | {project['requires-python']} | {', '.join(wanted) or '–'} |")
    return lines


def page(combinations: dict[str, Any], results: dict[str, Any]) -> str:
    """docs/versions.md."""
    lines = [TITLE, "| package | Python | needs |", "|---|---|---|", *stated(), ""]
    columns = ["combination", "tests of", "Python", *SHOWN, "verdict", "passed", "skipped", "date", "commit"]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for name, asked in combinations.items():
        found = results.get(name)
        if found is None:
            continue
        verdict = f"**{found['failed']} failed**" if found["failed"] else "passes"
        values = [name, asked["tests"], found["python"], *(found[one] or "–" for one in SHOWN), verdict]
        values += [str(found[one]) for one in ("passed", "skipped", "date", "commit")]
        lines.append("| " + " | ".join(values) + " |")
    for name, asked in combinations.items():
        if results.get(name, {}).get("failed") and "known" in asked:
            lines += ["", f"What fails with {name}: {asked['known']}."]
    lines += ["", "## Not run", ""]
    for name, asked in combinations.items():
        if name not in results:
            wanted = [asked.get("torch"), *asked.get("requires", []), asked.get("megatron") and "megatron-core"]
            about = ", ".join([f"Python {asked['python']}", *filter(None, wanted)])
            lines.append(f"- {name} ({about}; tests of {asked['tests']}): {asked.get('not_run', 'not yet')}.")
    return "\n".join(lines) + "\n"


def main() -> int:
    combinations = tomllib.loads((HERE / "combinations.toml").read_text())
    record = HERE / "ran.json"
    results = json.loads(record.read_text()) if record.exists() else {}
    failed = 0
    if len(sys.argv) == 3:
        name, junit = sys.argv[1], Path(sys.argv[2])
        results[name] = ran(junit)
        failed = results[name]["failed"]
        record.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    (ROOT / "docs/versions.md").write_text(page(combinations, results))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
