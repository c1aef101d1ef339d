"""What a package without code can promise: it imports, says its version, is typed, and offers nothing."""

from __future__ import annotations

from importlib.metadata import distribution
from importlib.resources import files

import logitless_mcore


def test_version_is_the_distributions() -> None:
    assert logitless_mcore.__version__ == distribution("logitless-mcore").version


def test_is_marked_as_typed() -> None:
    assert files(logitless_mcore).joinpath("py.typed").is_file()


def test_registers_nothing_while_it_holds_nothing() -> None:
    assert logitless_mcore.__all__ == ["__version__"]
    assert not list(distribution("logitless-mcore").entry_points)
