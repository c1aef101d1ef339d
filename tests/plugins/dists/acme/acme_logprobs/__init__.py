"""What a third party would write: a backend for plain heads, an adapter for its own model, a command."""

from __future__ import annotations

from typing import Annotated

import typer

from acme_logprobs.adapter import AcmeAdapter
from acme_logprobs.backend import AcmeBackend
from acme_logprobs.model import AcmeModel

__all__ = ["AcmeAdapter", "AcmeBackend", "AcmeModel", "greet"]


def greet(name: Annotated[str, typer.Argument(help="Whom to greet.")]) -> None:
    """Greets."""
    print(f"acme greets {name}")
