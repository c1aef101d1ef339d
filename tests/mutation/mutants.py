"""The places where cosmic-ray can change the sources, and a sample of them with one mutant for each.

A place is a span of source text that at least one operator of cosmic-ray changes: `<` is one place with many mutants.
Places are drawn, not mutants, because an arithmetic operator has eleven of these and would crowd out the rest.
"""

from __future__ import annotations

import ast
import difflib
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

__all__ = ["Mutant", "draw", "mutated", "places"]

Span = tuple[tuple[int, int], tuple[int, int]]  # (line from 1, column from 0), its end
Place = tuple[str, Span]  # path from the repository's root


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one place."""

    path: str
    line: int
    operator: str
    occurrence: int  # of this operator in the file
    definition: str  # the function or class that it lies in
    diff: str  # its line before and after

    @property
    def key(self) -> str:
        """What an explanation is filed under: without the line number, which others' changes move."""
        return f"{self.path} {self.definition}: {self.diff}"


def places(root: Path, folders: list[str]) -> dict[Place, list[tuple[str, int]]]:
    """Each place outside annotations, with the operators (and occurrences) that change it."""
    found: dict[Place, list[tuple[str, int]]] = defaultdict(list)
    operators = {name: get_operator(name) for name in operator_names()}
    # Those that need arguments, as names of variables, have no list of places.
    instances = {name: operator() for name, operator in operators.items() if not operator.arguments()}
    for file in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        source = file.read_text("utf-8")
        nodes = list(ast_nodes(get_ast(source)))
        annotations = list(_annotations(ast.parse(source)))
        for name, operator in instances.items():
            spans = [span for node in nodes for span in operator.mutation_positions(node)]
            for occurrence, (start, end) in enumerate(spans):
                if not any(first <= start and end <= last for first, last in annotations):
                    found[str(file.relative_to(root)), (start, end)].append((name, occurrence))
    return dict(found)


def draw(root: Path, population: dict[Place, list[tuple[str, int]]], count: int, seed: int) -> tuple[list[Mutant], int]:
    """A mutant for each of `count` random places, and how many places were passed over for want of one.

    What is not Python, or compiles to what stood there before, is no mutant.
    """
    chance = random.Random(seed)
    order = chance.sample(sorted(population), len(population))
    mutants: list[Mutant] = []
    passed_over = 0
    for path, span in order:
        if len(mutants) == count:
            break
        source = (root / path).read_text("utf-8")
        choices = population[path, span]
        for operator, occurrence in chance.sample(choices, len(choices)):
            text = mutated(root, path, operator, occurrence)
            if _differs(source, text):
                line = span[0][0]
                definition = _definition(ast.parse(source), line)
                mutants.append(Mutant(path, line, operator, occurrence, definition, _diff(source, text)))
                break
        else:
            passed_over += 1
    return mutants, passed_over


def mutated(root: Path, path: str, operator: str, occurrence: int) -> str:
    """The file's text with the mutant in it."""
    text = mutate_code((root / path).read_text("utf-8"), get_operator(operator)(), occurrence)
    if text is None:
        raise ValueError(f"{path}: {operator} has no occurrence {occurrence}; the file is not the one that was sampled")
    return str(text)


def _annotations(tree: ast.Module) -> Iterator[Span]:
    for node in ast.walk(tree):
        for note in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(note, ast.expr) and note.end_lineno is not None and note.end_col_offset is not None:
                yield (note.lineno, note.col_offset), (note.end_lineno, note.end_col_offset)


def _differs(source: str, text: str) -> bool:
    try:
        return ast.dump(ast.parse(source)) != ast.dump(ast.parse(text)) and bool(compile(text, "mutant", "exec"))
    except SyntaxError:
        return False


def _diff(source: str, text: str) -> str:
    lines = [line for line in difflib.ndiff(source.splitlines(), text.splitlines()) if line[:2] in ("- ", "+ ")]
    before = " ".join(line[2:].strip() for line in lines if line[0] == "-")
    after = " ".join(line[2:].strip() for line in lines if line[0] == "+")
    return f"{before} → {after or 'nothing'}"


def _definition(tree: ast.Module, line: int) -> str:
    names = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) <= line
        and line <= (node.end_lineno or line)
    ]
    return ".".join(names) or "module"
