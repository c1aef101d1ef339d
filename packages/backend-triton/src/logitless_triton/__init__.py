"""Reserves the name of logitless's Triton backend; it holds no kernel and registers no backend yet."""

from __future__ import annotations

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("logitless-triton")
