"""`logitless doctor`: what is installed, what would be chosen for a call and why, and a checkpoint's head."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from logitless._registry import (
    ADAPTERS,
    BACKENDS,
    COMMANDS,
    ENVIRONMENT,
    INSTALL,
    Choice,
    PluginStatus,
    explain_choice,
    load,
    requested_backend,
    statuses,
)
from logitless.errors import InvalidInputError, LogitlessError, NotFoundError
from logitless.types import Request

__all__ = ["call_request", "doctor", "report"]

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}


def call_request(device: str | None, dtype: str) -> Request:
    """A plain training call of a common size."""
    if dtype not in DTYPES:
        raise InvalidInputError(f"--dtype: got {dtype!r}, expected one of {', '.join(DTYPES)}")
    try:
        place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        raise InvalidInputError(f"--device: got {device!r}, expected a device of this machine: {error}") from error
    if place.type == "meta":
        raise InvalidInputError("--device: got 'meta', which holds no values; expected a device of this machine")
    return Request(
        device=place,
        hidden_dtype=DTYPES[dtype],
        weight_dtype=DTYPES[dtype],
        n_tokens=8192,
        hidden_size=4096,
        vocab_rows=151936,
    )


def _check_known(requested: str, option: str | None) -> None:
    """Raise for a name that no backend bears; one that could be installed is left to the report."""
    installed = [status.name for status in statuses(BACKENDS)]
    if requested not in {*installed, *INSTALL[BACKENDS]}:
        could = [f"{name} (pip install {dist})" for name, dist in INSTALL[BACKENDS].items() if name not in installed]
        asked = "--backend" if option else f"use_backend or {ENVIRONMENT}"
        raise NotFoundError(f"{asked}: got {requested!r}, expected one of {', '.join([*installed, *could])}")


def _verdicts(path: str) -> dict[str, Any]:
    """What each adapter says of a checkpoint."""
    verdicts: dict[str, Any] = {}
    for status in statuses(ADAPTERS):
        try:
            verdicts[status.name] = dict(load(ADAPTERS, status.name).inspect(path))
        except LogitlessError as error:
            verdicts[status.name] = {"ok": False, "reason": str(error)}
        except Exception as error:  # a plugin's fault must not hide the others
            verdicts[status.name] = {"ok": False, "reason": f"its inspect() raised {type(error).__name__}: {error}"}
    return verdicts


def _row(status: PluginStatus) -> dict[str, Any]:
    return {name: getattr(status, name) for name in ("name", "dist", "version", "ok", "reason")}


def report(
    model: str | None = None, backend: str | None = None, device: str | None = None, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """All that `doctor` prints, as JSON-ready data.

    Raises:
        InvalidInputError: the device or the dtype is none.
        NotFoundError: the backend that is asked for is neither installed nor known.
    """
    requested = requested_backend(backend)
    if requested is not None:
        _check_known(requested, backend)
    request = call_request(device, dtype)
    choice: Choice = explain_choice(request, requested)
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backends": [_row(status) for status in statuses(BACKENDS)],
        "adapters": [_row(status) for status in statuses(ADAPTERS)],
        "commands": [_row(status) for status in statuses(COMMANDS)],
        "request": {"device": str(request.device), "dtype": dtype, "backend": requested},
        "chosen": choice.name,
        "refused": choice.refused,
    }
    if model is not None:
        found["model"] = _verdicts(model)
    return found


def _print_rows(console: Console, title: str, rows: list[Mapping[str, Any]], notes: Mapping[str, str]) -> None:
    table = Table("name", "package", "version", "loads", "", title=title, title_justify="left", box=None)
    for row in rows:
        note = row["reason"] or notes.get(row["name"], "")
        table.add_row(row["name"], row["dist"], row["version"], "yes" if row["ok"] else "no", escape(note))
    if not rows:
        table.add_row("none", "", "", "", "")
    console.print(table, "")


def _print(found: Mapping[str, Any]) -> None:
    console = Console()
    console.print(f"python {found['python']}, torch {found['torch']}\n", highlight=False)
    notes = {name: f"not for this call: {reason}" for name, reason in found["refused"].items()}
    if found["chosen"] is not None:
        notes[found["chosen"]] = "chosen"
    _print_rows(console, "backends", found["backends"], notes)
    _print_rows(console, "adapters", found["adapters"], {})
    _print_rows(console, "commands", found["commands"], {})
    asked = found["request"]
    call = f"{asked['dtype']} on {asked['device']}"
    if found["chosen"] is not None:
        console.print(f"A call in {call} would run on [bold]{found['chosen']}[/].", highlight=False)
    else:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found["refused"].items())
        reasons = reasons or "none is installed; pip install logitless-torch"
        console.print(f"No backend can serve a call in {call}: {escape(reasons)}", highlight=False)
    for name, verdict in found.get("model", {}).items():
        table = Table("", "", title=f"model, by adapter {name}", title_justify="left", box=None, show_header=False)
        for key, value in verdict.items():
            table.add_row(key, escape(str(value)))
        console.print("", table)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    model: Annotated[str | None, typer.Option(help="A checkpoint whose head is to be judged.")] = None,
    backend: Annotated[str | None, typer.Option(help="Ask for this backend; exit 1 if it cannot serve.")] = None,
    device: Annotated[str | None, typer.Option(help="Device of the call; cuda where there is one, else cpu.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the call.")] = "bfloat16",
) -> None:
    """Show what is installed, which backend a call would take and why, and the verdict on a checkpoint's head."""
    found = report(model, backend, device, dtype)
    if as_json:
        print(json.dumps(found, indent=2, default=str))
    else:
        _print(found)
    if found["request"]["backend"] is not None and found["chosen"] is None:
        raise typer.Exit(1)
