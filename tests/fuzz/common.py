"""What the fuzz tests share: how many examples, from which seed, and the tally that docs/fuzz.md is made of.

The default is a short slice that is the same every time; `nox -s fuzz` runs thousands.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis

__all__ = ["KILLS", "SEED", "TALLY", "Tally", "fuzzed", "tiny"]

ROOT = Path(__file__).parents[2]
EXAMPLES = int(os.environ.get("LOGITLESS_FUZZ_EXAMPLES", "10"))
KILLS = int(os.environ.get("LOGITLESS_FUZZ_KILLS", "3"))
SEED = int(os.environ.get("LOGITLESS_FUZZ_SEED", "20261130"))


def fuzzed(share: float = 1.0) -> Callable[[Any], Any]:
    """A property of `share` times as many examples as are asked for, always from the same seed."""
    settings = hypothesis.settings(
        max_examples=max(1, round(EXAMPLES * share)),
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    return lambda test: hypothesis.seed(SEED)(settings(test))


class Tally:
    """By area: examples, how many gave a result, and the errors told, each with its values taken out."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        self.errors: dict[str, Counter[str]] = {}

    def right(self, area: str) -> None:
        self.results[area] += 1

    def told(self, area: str, error: BaseException | str) -> None:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        text = re.sub(r"'[^']*'|\"[^\"]*\"|\([^()]*\)|\[[^\[\]]*\]|-?\d[\d.e+-]*|/\S+", "…", text.split("\n")[0])
        self.errors.setdefault(area, Counter())[text[:160]] += 1

    def as_json(self) -> dict[str, Any]:
        return {
            area: {"right": self.results[area], "errors": dict(self.errors.get(area, Counter()))}
            for area in sorted({*self.results, *self.errors})
        }


TALLY = Tally()


def tiny() -> ModuleType:
    """The tiny checkpoint, records and commands of the tests of `logitless score`."""
    path = ROOT / "packages/adapter-hf/tests/score/conftest.py"
    spec = importlib.util.spec_from_file_location("score_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
