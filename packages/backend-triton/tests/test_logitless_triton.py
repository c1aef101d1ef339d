"""What a package without code can promise: it imports, says its version, is typed, and offers nothing."""

from __future__ import annotations

from importlib.metadata import distribution
from importlib.resources import files

import logitless_triton


def test_version_is_the_distributions() -> None:
    assert logitless_triton.__version__ == distribution("logitless-triton").version


def test_is_marked_as_typed() -> None:
    assert files(logitless_triton).joinpath("py.typed").is_file()


def test_registers_nothing_while_it_holds_nothing() -> None:
    assert logitless_triton.__all__ == ["__version__"]
    assert not list(distribution("logitless-triton").entry_points)
