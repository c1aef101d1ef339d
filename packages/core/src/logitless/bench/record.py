"""The results: one record, as JSON, as a table and as a plot."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from logitless.bench.candidates import Candidate
from logitless.bench.inputs import Shape
from logitless.bench.peers import PEERS, dist_version
from logitless.bench.timing import Measured
from logitless.errors import InvalidInputError, NotFoundError

__all__ = ["Row", "ShapeResult", "check_files", "draw", "machine", "show", "versions"]

NOTES = {"both": "", "log-prob": "log-prob only", "loss": "loss only"}
OURS = ("logitless", "logitless-torch", "logitless-triton", "triton", "nvidia-cutlass-dsl")


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate's figures."""

    candidate: Candidate
    errors: dict[str, float]
    peak_gib: float | None
    measured: Measured

    def as_json(self, limits: dict[str, float]) -> dict[str, Any]:
        """Figures by name; the ratio is to the limit's median."""
        candidate, measured = self.candidate, self.measured
        limit = limits.get(candidate.limit)
        return {
            "name": candidate.name,
            "kind": candidate.kind,
            "mode": candidate.mode,
            "outputs": candidate.outputs,
            "median_ms": measured.median_ms,
            "quartiles_ms": list(measured.quartiles_ms),
            "processor_ms": measured.processor_ms,
            "limit": candidate.limit,
            "ratio": None if limit is None else measured.median_ms / limit,
            "peak_gib": self.peak_gib,
            "errors": self.errors,
        }


@dataclass(slots=True)
class ShapeResult:
    """All rows of one size, and what was not run with the reason."""

    shape: Shape
    rows: list[Row] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    failed: bool = False  # this op raised what it should not have

    def as_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        limits = {row.candidate.limit: row.measured.median_ms for row in self.rows if row.candidate.kind == "limit"}
        return {
            "tokens": self.shape.tokens,
            "hidden": self.shape.hidden,
            "vocab": self.shape.vocab,
            "rounds": self.rows[0].measured.rounds if self.rows else 0,
            "rows": [row.as_json(limits) for row in self.rows],
            "not_run": self.not_run,
        }


def versions() -> dict[str, str | None]:
    """Of everything whose speed is measured, None where it is not installed."""
    dists = dict.fromkeys((*OURS, *(peer.dist for peer in PEERS.values())))
    return {
        "python": platform.python_version(),
        **{dist: dist_version(dist) for dist in dists},
        "torch": torch.__version__,
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Date and machine, as they stand in the record."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return {"date": date.today().isoformat(), "device": {"type": device.type, "name": name}, "versions": versions()}


def _figures(row: dict[str, Any]) -> dict[str, str]:
    """A row's cells by column; a column that is empty in every row is not shown."""
    low, high = row["quartiles_ms"]
    return {
        "ms": f"{row['median_ms']:.2f}",
        "quartiles": f"{low:.2f}–{high:.2f}",
        "processor ms": "" if row["processor_ms"] is None else f"{row['processor_ms']:.1f}",
        "of products": "" if row["ratio"] is None else f"{row['ratio']:.3f} × {row['limit']}",
        "peak GiB": "" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}",
        "|Δ log_prob|": f"{row['errors']['log_probs']:.0e}" if "log_probs" in row["errors"] else "",
        "note": NOTES[row["outputs"]],
    }


def show(name: str, found: dict[str, Any], console: Console) -> None:
    """Print one size's results as a table for each mode."""
    sizes = f"{name}: {found['tokens']} tokens, D {found['hidden']}, V {found['vocab']}"
    for mode, title in (("forward", "forward"), ("backward", "forward + backward")):
        rows = [row for row in found["rows"] if row["mode"] == mode]
        if not rows:
            continue
        cells = [_figures(row) for row in rows]
        columns = [column for column in cells[0] if any(cell[column] for cell in cells)]
        table = Table(title=f"{sizes}, {title}, medians of {found['rounds']}", title_justify="left", box=None)
        table.add_column("", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="left" if column == "note" else "right", no_wrap=True)
        for row, cell in zip(rows, cells, strict=True):
            label = escape(row["name"])
            table.add_row(f"[bold]{label}[/]" if row["kind"] == "ours" else label, *(cell[name] for name in columns))
        console.print(table, "")
    for label, reason in found["not_run"].items():
        console.print(f"not run: {escape(label)}: {escape(reason)}", highlight=False, soft_wrap=True)
    if found["not_run"]:
        console.print()


def check_files(json_path: Path | None, plot: Path | None) -> None:
    """Raise for results that could not be written: before all is measured, not after."""
    if plot is not None:
        _check_plot(plot)
    for option, path in (("--json", json_path), ("--plot", plot)):
        if path is None:
            continue
        new = not os.path.lexists(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
            if new:
                path.unlink()
        except OSError as error:
            raise InvalidInputError(
                f"{option}: got {path}, which cannot be written ({error}); choose another"
            ) from error


def _check_plot(path: Path) -> None:
    """Raises NotFoundError, with what to install, where there is no matplotlib."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise NotFoundError("--plot needs matplotlib; pip install 'logitless[plot]'") from error
    if path.suffix and path.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise InvalidInputError(f"--plot: got {path}, expected a name that ends in .png, .svg or .pdf")


def draw(record: dict[str, Any], path: Path) -> None:
    """Bars of every median, a panel for each size and mode; quartiles as whiskers."""
    from matplotlib.figure import Figure

    panels = [
        (name, mode, [row for row in found["rows"] if row["mode"] == mode])
        for name, found in record["shapes"].items()
        for mode in ("forward", "backward")
    ]
    panels = [panel for panel in panels if panel[2]]
    heights = [1.0 + 0.28 * len(rows) for *_, rows in panels]
    figure = Figure(figsize=(9, sum(heights) or 1), layout="constrained")
    axes = figure.subplots(len(panels) or 1, 1, squeeze=False, height_ratios=heights or None)[:, 0]
    colours = {"ours": "tab:blue", "limit": "tab:gray", "logits": "tab:orange", "peer": "tab:green"}
    for axis, (name, mode, rows) in zip(axes, panels, strict=False):
        rows = rows[::-1]
        medians = [row["median_ms"] for row in rows]
        spread = [[abs(row["quartiles_ms"][i] - row["median_ms"]) for row in rows] for i in (0, 1)]
        labels = [row["name"] + (f" ({NOTES[row['outputs']]})" if NOTES[row["outputs"]] else "") for row in rows]
        axis.barh(labels, medians, xerr=spread, color=[colours[row["kind"]] for row in rows])
        axis.set_xlabel("ms")
        axis.set_title(f"{name}, {'forward' if mode == 'forward' else 'forward + backward'}", loc="left", fontsize=10)
    figure.suptitle(f"{record['device']['name']}, {record['dtype']}, {record['date']}", fontsize=10)
    figure.savefig(path)
