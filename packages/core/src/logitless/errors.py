"""Every exception that logitless raises on purpose; each also derives from the builtin a caller would expect."""

from __future__ import annotations

__all__ = [
    "BrokenPluginError",
    "CollectiveError",
    "InputTypeError",
    "InvalidInputError",
    "LogitlessError",
    "NotFoundError",
    "UnsupportedError",
]


class LogitlessError(Exception):
    """Base of all exceptions of this project."""


class InvalidInputError(LogitlessError, ValueError):
    """An argument has a shape, range or combination that cannot be served."""


class InputTypeError(LogitlessError, TypeError):
    """An argument is of the wrong type or dtype."""


class NotFoundError(LogitlessError, LookupError):
    """No installed package provides the named plugin; the message holds the `pip install` line."""


class BrokenPluginError(LogitlessError, ImportError):
    """A plugin is installed but could not be loaded; `__cause__` holds why."""


class UnsupportedError(LogitlessError, RuntimeError):
    """A backend or adapter said why it cannot serve this request or model."""


class CollectiveError(LogitlessError, RuntimeError):
    """A collective over a group of ranks failed: one of them died, raised, or made another call."""
