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


def score(mutants: list[Mutant], results: dict[str, Any], explained: dict[str, Any]) -> tuple[float, int]:
    """The share killed of mutants that change what the code does, and how many survivors nothing is said of."""
    alive, alike = _alive(mutants, results), _alike(mutants, results, explained)
    killed, unexplained = len(results) - len(alive), sum(mutant.key not in explained for mutant in alive)
    return killed / max(len(results) - len(alike), 1), unexplained


def page(
    sample: dict[str, Any],
    mutants: list[Mutant],
    results: dict[str, Any],
    explained: dict[str, Any],
    seconds: float,
    gaps: list[str],
) -> str:
    """The page as Markdown; `gaps` names the mutants that survived until a test was written for them."""
    share, _ = score(mutants, results, explained)
    alive, alike = _alive(mutants, results), _alike(mutants, results, explained)
    endings = Counter(result["ending"] for result in results.values())
    killed = len(results) - len(alive)
    lines = [
        "# Mutation score",
        "",
        "Written by the script of `nox -s mutation`: faults planted at random places of core, both backends and "
        f"packing by cosmic-ray {version('cosmic-ray')}, with torch {torch.__version__} on the CPU (Triton's kernels "
        f"in its interpreter), sources of commit {sample['commit'][:12]}, "
        "whose line numbers the tables have.",
        "",
        f"**{killed} of {len(results)} mutants killed, {killed / max(len(results), 1):.1%}.** {len(alive)} survived, "
        f"of which {len(alike)} are equivalent: they change nothing that a test could see. Of the others "
        f"{killed} of {len(results) - len(alike)}, {share:.1%}, were killed; the target, {TARGET:.0%}, is "
        f"{'reached' if share >= TARGET else 'missed'}.",
        "",
        f"- Population: {sample['places']} places with {sample['choices']} possible changes, outside annotations. A "
        "place is a span of source that one of cosmic-ray's operators (those without arguments) can change.",
        f"- Sample: {len(results)} places, uniformly without replacement by seed {sample['seed']}; of each place one "
        "change, at random among those that compile to something else; places passed over for want of one: "
        f"{sample['passed_over']}.",
        "- A mutant meets the tests of the three packages that run its line, the fastest first, then those that start "
        f"processes; of each package at most {seconds:.0f} s by their usual time, and of one that is explained only "
        "its own package's fastest. The adapters' tests and those in `tests/` are not used.",
    ]
    closed = [mutant for at, mutant in enumerate(mutants) if str(at) in results and mutant.key in gaps]
    first = killed - len(closed)
    lines.append(
        f"- {len(closed)} of the killed, listed in `tests/mutation/gaps.json`, were alive until tests were written for "
        f"what they broke. Without these tests at least {first} of {len(results) - len(alike)} are killed, "
        f"{first / max(len(results) - len(alike), 1):.1%}."
    )
    lines.append(
        "- Of modules that are new since that commit no mutant was drawn; what has changed since, "
        f"`git diff --stat {sample['commit'][:12]} -- 'packages/*/src'` tells."
    )
    lines += [f"- {endings[ending]} killed because {words}." for ending, words in ENDINGS.items() if endings[ending]]
    lines += ["", "| part | mutants | killed |", "|---|---|---|"]
    for part, prefix in PARTS.items():
        inside = [at for at in map(int, results) if _part(mutants[at].path) == prefix]
        dead = sum(results[str(at)]["ending"] not in ("passed", "alive") for at in inside)
        lines.append(f"| {part} | {len(inside)} | {dead} |")
    nothing = {"equivalent": False, "why": "**not explained**"}
    lines += ["", "## Survivors", "", "| place | change | equivalent | why |", "|---|---|---|---|"]
    for mutant in sorted(alive, key=lambda mutant: (mutant.path, mutant.line)):
        said = explained.get(mutant.key, nothing)
        place = f"{mutant.path.removeprefix('packages/')}:{mutant.line}"
        lines.append(f"| {place} | {_code(mutant.diff)} | {'yes' if said['equivalent'] else 'no'} | {said['why']} |")
    for title, ending in (("Not in time", "late"), ("Not collected", "not loaded")):
        found = [mutants[int(at)] for at, result in results.items() if result["ending"] == ending]
        if found:
            lines += ["", f"## {title}", "", "Counted as killed.", "", "| place | change |", "|---|---|"]
            lines += [f"| {m.path.removeprefix('packages/')}:{m.line} | {_code(m.diff)} |" for m in found]
    return "\n".join(lines) + "\n"


def _alive(mutants: list[Mutant], results: dict[str, Any]) -> list[Mutant]:
    return [mutants[int(at)] for at, result in results.items() if result["ending"] in ("passed", "alive")]


def _alike(mutants: list[Mutant], results: dict[str, Any], explained: dict[str, Any]) -> list[Mutant]:
    return [mutant for mutant in _alive(mutants, results) if explained.get(mutant.key, {}).get("equivalent")]


def _part(path: str) -> str:
    return max((prefix for prefix in PARTS.values() if path.startswith(prefix)), key=len)


def _code(text: str) -> str:
    return " → ".join(f"`{side}`" for side in text.replace("|", "\\|").split(" → "))
