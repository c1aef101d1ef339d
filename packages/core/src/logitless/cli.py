"""The `logitless` command: `doctor` is core's, every other subcommand is a plugin, loaded when it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from logitless._registry import COMMANDS, INSTALL, load, statuses
from logitless.doctor import doctor
from logitless.errors import LogitlessError

__all__ = ["main"]


def _as_command(name: str, function: Callable[..., Any]) -> Any:
    app = typer.Typer(add_completion=False)
    app.command(name)(function)
    return typer.main.get_command(app)


class _PluginGroup(TyperGroup):
    """Core's commands and those of the entry-point group `logitless.commands`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *(status.name for status in statuses(COMMANDS) if status.ok)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        installed = {status.name for status in statuses(COMMANDS)}
        if own is not None or (cmd_name not in installed and cmd_name not in INSTALL[COMMANDS]):
            return own
        return _as_command(cmd_name, load(COMMANDS, cmd_name))


app = typer.Typer(cls=_PluginGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(doctor)


@app.callback()
def _root() -> None:
    """Exact per-token log-probabilities and entropies, without the logits."""


def main() -> None:
    """Run the command line; a `LogitlessError` ends it with its message and exit code 1, an interrupt with 130."""
    try:
        app()
    except LogitlessError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:  # while a command was being loaded: once it runs, typer ends it so
        sys.exit(130)
