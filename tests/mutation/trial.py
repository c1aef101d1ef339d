"""One mutant against chosen tests, in a process forked after torch and pytest are loaded, which is most of a start."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import hypothesis  # noqa: F401  loaded once, here, with what follows
import pydantic  # noqa: F401
import pytest
import rich  # noqa: F401
import typer  # noqa: F401

os.environ["TRITON_INTERPRET"] = "1"  # Triton chooses its interpreter when it is imported, and the next line does that
import_module("torch._dynamo")

del os.environ["TRITON_INTERPRET"]

__all__ = ["Tried", "try_tests"]

MEMORY = 12 << 30  # of one process: a mutant's mistaken shape must not take the machine down


@dataclass(slots=True)
class Tried:
    """How the tests ended: "passed", "failed" (by which), "crashed", "late" or "not loaded"."""

    ending: str
    by: str = ""
    why: str = ""


@dataclass
class _Chosen:
    """A pytest plugin that runs `order`, after the tests in the same files that are not `known`, if that is given."""

    order: dict[str, int]
    known: set[str] | None
    failures: list[tuple[str, str]] = field(default_factory=list)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        new = [] if self.known is None else [item for item in items if item.nodeid not in self.known]
        kept = [item for item in items if item.nodeid in self.order] + new
        items[:] = sorted(kept, key=lambda item: self.order.get(item.nodeid, -1))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failures.append((report.nodeid, str(getattr(crash, "message", report.longrepr))[:300]))


def try_tests(
    copy: Path, sources: list[str], tests: list[str], known: set[str] | None, files: set[str], limit: float
) -> Tried:
    """Runs tests of the tree at `copy` until one fails: those of the files that are not `known`, then `tests`."""
    order = {name: at for at, name in enumerate(tests)}
    arguments = sorted({name.partition("::")[0] for name in tests} | files)
    answer = copy / "answer.json"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 70
        try:
            code = _child(copy, sources, arguments, _Chosen(order, known), answer)
        finally:
            os._exit(code)
    end = time.monotonic() + limit
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        late = time.monotonic() > end
        if done or late:
            break
        time.sleep(0.05)
    _end_group(child)  # with the ranks that it may have left
    if not done:
        os.waitpid(child, 0)
        return Tried("late", why=f"not done within {limit:.0f} s")
    code = os.waitstatus_to_exitcode(status)
    failures = json.loads(answer.read_text("utf-8")) if answer.exists() else []
    if failures:
        return Tried("failed", *failures[0])
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return Tried("passed")
    tail = (copy / "output.txt").read_text("utf-8", "replace")[-300:]
    return Tried("crashed" if code < 0 else "not loaded", why=f"exit code {code}: {tail}")


def _child(copy: Path, sources: list[str], arguments: list[str], chosen: _Chosen, answer: Path) -> int:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.chdir(copy)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    folders = [str(copy / folder) for folder in sources]
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)  # for the processes that tests start
    if any("backend-triton" in name for name in arguments):  # what its conftest.py does where Triton is not yet loaded
        os.environ["TRITON_INTERPRET"] = "1"
        import_module("logitless_triton.policy")
        del os.environ["TRITON_INTERPRET"]
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments], plugins=[chosen])
    spec = find_spec("logitless")
    if spec is None or not str(spec.origin).startswith(str(copy)):
        raise RuntimeError(f"the tests ran {spec}, not the mutant in {copy}")
    answer.write_text(json.dumps(chosen.failures), "utf-8")
    return int(code)


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return
