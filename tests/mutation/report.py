"""What a run found, as a page of the documentation."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from typing import Any

import torch
from mutants import Mutant

__all__ = ["page", "score"]

TARGET = 0.95
PARTS = {
    "core, the op, packing, losses and commands": "packages/core/src/logitless/",
    "core, `logitless.testing`": "packages/core/src/logitless/testing/",
    "core, `logitless bench`": "packages/core/src/logitless/bench/",
    "backend-torch": "packages/backend-torch/",
    "backend-triton": "packages/backend-triton/",
}
ENDINGS = {
    "failed": "a test failed",
    "crashed": "the process crashed",
    "late": "the tests did not end in time",
    "not loaded": "the tests could not even be collected",
}


def score(mutants: list[Mutant], results: dict[str, Any], explained: dict[str, str]) -> tuple[float, int]:
    """The share of mutants that were killed, and how many survivors nothing is said of."""
    alive = _alive(mutants, results)
    return 1 - len(alive) / max(len(results), 1), sum(mutant.key not in explained for mutant in alive)


def page(sample: dict[str, Any], mutants: list[Mutant], results: dict[str, Any], explained: dict[str, str]) -> str:
    """The page as Markdown."""
    killed, _ = score(mutants, results, explained)
    alive = _alive(mutants, results)
    endings = Counter(result["ending"] for result in results.values())
    share = "reached" if killed >= TARGET else "not reached"
    lines = [
        "# Mutation score",
        "",
        "Written by the script of `nox -s mutation`: faults planted at random places of core, both backends and "
        f"packing by cosmic-ray {version('cosmic-ray')}, with torch {torch.__version__} on the CPU (Triton's kernels "
        f"in its interpreter), sources of commit {sample['commit'][:12]}.",
        "",
        f"**{len(results) - len(alive)} of {len(results)} mutants killed, {killed:.1%}** (target {TARGET:.0%}: "
        f"{share}); {len(alive)} survived.",
        "",
        f"- Population: {sample['places']} places with {sample['choices']} possible changes, outside annotations. A "
        "place is a span of source that one of cosmic-ray's operators (those without arguments) can change.",
        f"- Sample: {len(results)} places, uniformly without replacement by seed {sample['seed']}; of each place one "
        f"change, at random among those that compile to something else ({sample['passed_over']} places had none).",
        "- A mutant meets the tests of the three packages that run its line, the fastest first, then those that start "
        "processes; the adapters' tests and those in `tests/` are not used.",
    ]
    lines += [f"- {endings[ending]} killed because {words}." for ending, words in ENDINGS.items() if endings[ending]]
    lines += ["", "| part | mutants | killed |", "|---|---|---|"]
    for part, prefix in PARTS.items():
        inside = [at for at in map(int, results) if _part(mutants[at].path) == prefix]
        dead = sum(results[str(at)]["ending"] not in ("passed", "alive") for at in inside)
        lines.append(f"| {part} | {len(inside)} | {dead} |")
    lines += ["", "## Survivors", "", "| place | change | why |", "|---|---|---|"]
    for mutant in alive:
        place = f"{mutant.path.removeprefix('packages/')}:{mutant.line}"
        lines.append(f"| {place} | {_code(mutant.diff)} | {explained.get(mutant.key, '**not explained**')} |")
    return "\n".join(lines) + "\n"


def _alive(mutants: list[Mutant], results: dict[str, Any]) -> list[Mutant]:
    return [mutants[int(at)] for at, result in results.items() if result["ending"] in ("passed", "alive")]


def _part(path: str) -> str:
    return max((prefix for prefix in PARTS.values() if path.startswith(prefix)), key=len)


def _code(text: str) -> str:
    return " → ".join(f"`{side}`" for side in text.replace("|", "\\|").split(" → "))
