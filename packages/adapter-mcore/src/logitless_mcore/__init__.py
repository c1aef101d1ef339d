"""Reserves the name of logitless's Megatron-Core adapter; it binds no model and registers no adapter yet."""

from __future__ import annotations

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("logitless-mcore")
