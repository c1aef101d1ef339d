"""Which tests run which lines, so that a mutant meets only those that can tell it, the fastest first."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from itertools import accumulate
from pathlib import Path

from coverage import CoverageData

__all__ = ["CoverageMap", "statement"]

IMPORT = ""  # the context of what ran outside any test: imports


class CoverageMap:
    """What one package's tests ran of the sources, each line with the node ids of its tests."""

    def __init__(self, root: Path, data: Path, watch: Path) -> None:
        found = json.loads(watch.read_text("utf-8"))
        self.seconds: dict[str, float] = found["seconds"]
        self.starting: set[str] = set(found["starting"])
        coverage = CoverageData(str(data))
        coverage.read()
        self.lines: dict[str, dict[int, set[str]]] = defaultdict(dict)
        for file in coverage.measured_files():
            lines = coverage.contexts_by_lineno(file)
            path = str(Path(file).relative_to(root))
            self.lines[path] = {line: {name.rpartition("|")[0] for name in names} for line, names in lines.items()}

    def split(self, path: str, span: range, first: float, second: float) -> tuple[list[str], list[str]]:
        """The tests that run one of these lines, the fastest first: those of `first` seconds, then of `second` more.

        Tests that start processes come last, as what these run was not seen. Lines that only an import runs, as a
        constant, belong to every test that runs any line of the file.
        """
        lines = self.lines[path]
        anywhere = set().union(*lines.values()) - {IMPORT}
        if not anywhere:
            return [], []
        seen = set().union(*(lines.get(line, set()) for line in span))
        here = seen - {IMPORT} or (anywhere if seen else set())
        tests = self._fastest(here) + self._fastest(self.starting - here)
        if not seen:
            tests += self._fastest(anywhere - self.starting)
        times = list(accumulate(self.seconds[name] for name in tests))
        cut, end = (sum(time <= limit for time in times) for limit in (first, first + second))
        return tests[:cut], tests[cut:end]

    def _fastest(self, names: set[str]) -> list[str]:
        return sorted(names & self.seconds.keys(), key=lambda name: (self.seconds[name], name))


def statement(source: str, line: int) -> range:
    """The lines of the innermost statement at `line`: of a function or class all, of a block only its header."""
    best: ast.stmt | None = None
    first = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
            if start <= line <= (node.end_lineno or start) and start >= first:
                best, first = node, start
    if best is None:
        return range(line, line + 1)
    body = getattr(best, "body", None)
    if body and not isinstance(best, (ast.FunctionDef, ast.ClassDef)) and line < body[0].lineno:
        return range(first, body[0].lineno)
    return range(first, (best.end_lineno or first) + 1)
