"""Writes the tables of README.md and docs/ from benchmarks/results/*.json, so that no figure is typed.

    python benchmarks/tables.py [--check]

A table stands between `<!-- table: KIND FILES [SHAPES] -->` and `<!-- /table -->`. FILES are results of
`logitless bench --json` on one machine, joined by + (what an earlier one holds is not taken from a later one), and
SHAPES a list with commas; all, if it is not given. Or it is one file of another script's results. KIND is one of
`KINDS`. With --check nothing is written, and the exit code is 1 where a page is not current.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("mcore", "performance", "training-loop", "trl")),
    "packages/backend-triton/README.md",
)
RESULTS = ROOT / "benchmarks" / "results"
REGION = re.compile(r"(<!-- table: (\S+) (\S+)(?: (\S+))? -->\n).*?(<!-- /table -->)", re.DOTALL)
ORDER = " s1 s2 s3 s4 s5 l n256 n1024 n2048 small custom "
MODES = {"forward": "forward", "backward": "forward + backward"}
LABELS = {  # rows of this op by what a reader calls
    "forward": "forward",
    "forward, unvalidated": "forward, `validate=False`",
    "recompute": "recompute",
    "recompute, unvalidated": "recompute, `validate=False`",
    "recompute, half ignored": "recompute, half of the labels ignored",
    "recompute, nine tenths ignored": "recompute, nine tenths of the labels ignored",
    "kept": "kept (`keep_bytes` for all logits)",
    "kept, unvalidated": "kept, `validate=False`",
    "kept, entropy_grad=False, unvalidated": "kept, `entropy_grad=False`, `validate=False`",
    "kept, half": "half kept",
    "kept, entropy_grad=False": "kept, `entropy_grad=False`",
    "single pass": "`linear_policy_loss`",
    "single pass, 1.25 GiB": "`linear_policy_loss`, 1.25 GiB workspace",
    "single pass, 2.5 GiB": "`linear_policy_loss`, 2.5 GiB workspace",
    "single pass, grad_buffer": "`linear_policy_loss`, `grad_buffer`",
}
NOTES = {"both": "", "log-prob": ", no entropy", "loss": ", loss only"}
Record = dict[str, Any]
Cell = Callable[[Record], str]


def label(row: Record) -> str:
    """What the first column says of a row."""
    name: str = row["name"]
    if row["kind"] == "limit":
        return name.replace("products", "matrix products alone")
    if row["kind"] != "ours":
        return name + NOTES[row["outputs"]]
    backend, way = name.split(": ", 1)
    return f"**{LABELS.get(way, way)}**" + ("" if backend == "triton" else f" ({backend} backend)")


def markdown(header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in rows)


def by_shape(record: Record, cell: Cell, keep: Callable[[Record], bool], first: str) -> str:
    """A line for each candidate and a column for each shape; a dash where it did not run."""
    shapes = record["shapes"]
    found: dict[tuple[str, str], dict[str, str]] = {}
    for name, shape in shapes.items():
        for row in shape["rows"]:
            if keep(row):
                found.setdefault((row["mode"], label(row)), {})[name] = cell(row)
    sizes = ["N, D, V", *(f"{shape['tokens']}, {shape['hidden']}, {shape['vocab']}" for shape in shapes.values())]
    lines = [sizes]
    for mode, title in MODES.items():
        names = [line for of, line in found if of == mode]
        if names:
            lines.append([f"*{title}*", *[""] * len(shapes)])
        lines += [[line, *(found[mode, line].get(name, "–") for name in shapes)] for line in names]
    return markdown([first, *(name.upper() for name in shapes)], lines)


def times(record: Record) -> str:
    """Milliseconds, and the peak of memory in GiB beyond the inputs."""

    def cell(row: Record) -> str:
        return f"{row['median_ms']:.1f}" + ("" if row["peak_gib"] is None else f" ({row['peak_gib']:.1f})")

    return by_shape(record, cell, main, "ms (peak GiB)")


def all_times(record: Record) -> str:
    """As `times`, with every way."""
    return by_shape(record, lambda row: f"{row['median_ms']:.2f}", lambda row: True, "ms")


def main(row: Record) -> bool:
    """Rows for a first look."""
    return not re.search(r"unvalidated|ignored|half|1.25|grad_buffer", row["name"])


def ratios(record: Record) -> str:
    """This op's medians over those of the matrix products that the way needs."""
    keep = lambda row: row["kind"] == "ours" and row["ratio"] is not None  # noqa: E731
    return by_shape(record, lambda row: f"{row['ratio']:.3f} × {row['limit']}", keep, "ratio")


def errors(record: Record) -> str:
    """Largest error of a log-prob in nats and relative error of d_weight, against float64, over all shapes."""
    worst: dict[str, dict[str, float]] = {}
    for shape in record["shapes"].values():
        for row in shape["rows"]:
            of = worst.setdefault(label(row), {}) if row["errors"] else {}
            for name, error in row["errors"].items():
                of[name] = max(error, of.get(name, 0.0))
    columns = {
        "log_probs": "log_prob, nats",
        "entropy": "entropy, nats",
        "d_hidden": "d_hidden",
        "d_weight": "d_weight",
    }
    lines = [[line, *(f"{of[name]:.1e}" if name in of else "–" for name in columns)] for line, of in worst.items()]
    return markdown(["largest error", *columns.values()], lines)


def against_logits(record: Record) -> str:
    """Seconds, and how many times those of the full logits, of one shape on a CPU."""
    rows = next(iter(record["shapes"].values()))["rows"]
    base = {row["mode"]: row["median_ms"] for row in rows if row["name"] == "full logits, eager"}
    lines = [
        [
            label(row).replace(" (torch backend)", ""),
            f"{row['median_ms'] / 1e3:.2f}",
            f"{row['median_ms'] / base[row['mode']]:.2f}",
        ]
        for row in rows
        if row["mode"] == "backward" and row["kind"] != "limit"
    ]
    return markdown(["forward + backward", "s", "against full logits"], lines)


def setting(record: Record) -> str:
    """Where, when and with what the figures were measured, and what was not run."""
    rounds = {shape["rounds"] for shape in record["shapes"].values()}
    medians = f"{min(rounds)}" if len(rounds) == 1 else f"{min(rounds)} to {max(rounds)}"
    known = ", ".join(f"{name} {found}" for name, found in record["versions"].items() if found)
    text = f"{record['device']['name']}, {record['dtype']}, {record['date']}, medians of {medians} runs; {known}.\n"
    reasons: dict[str, str] = {}
    for name, shape in record["shapes"].items():
        for what, reason in shape["not_run"].items():
            reasons.setdefault(f"{what}: {reason}", "")
            reasons[f"{what}: {reason}"] += f" {name.upper()}"
    text += "".join(f"- not run at{where}: {what}\n" for what, where in reasons.items())
    return text + (f"\n{record['note']}.\n" if "note" in record else "")


def steps(record: Record) -> str:
    """Seconds and the peak of memory of each run of one script (`trl_step.py`, `mcore_step.py`)."""
    lines = [
        [name, run["not_run"], ""]
        if "not_run" in run
        else [name, f"{run['median_seconds']:.3f}", f"{run['peak_bytes'] / 2**30:.1f}"]
        for name, run in record["runs"].items()
    ]
    return _setting(record) + markdown(["run", "s", "peak GiB"], lines)


def _setting(record: Record) -> str:
    """Where, when and with what a script other than `logitless bench` measured."""
    card = record.get("card") or record["device"]["name"]
    known = ", ".join(f"{name} {found}" for name, found in record["versions"].items() if found)
    note = f" {record['note']}." if "note" in record else ""
    return f"{card}, {record['date']}; {known}.{note}\n\n"


def checked(record: Record) -> str:
    """The errors that `mcore_step.py` looked at before it timed anything."""
    return markdown(["what", "difference"], [[what, f"{found:.1e}"] for what, found in record["errors"].items()])


def engine(record: Record) -> str:
    """Relative errors of `te_thd.py` against fp32, and the largest of all gradients."""
    found: dict[str, list[dict[str, float]]] = {}
    for name, errors in record["relative_errors"].items():
        found.setdefault("largest of the gradients" if name.startswith("gradient") else name, []).append(errors)
    columns = {"transformer_engine": "Transformer Engine", "ours": "varlen_attn", "between_them": "between them"}
    lines = [[name, *(f"{max(of[key] for of in each):.1e}" for key in columns)] for name, each in found.items()]
    return markdown(["relative L2 difference, bf16 against fp32", *columns.values()], lines)


def divergences(record: Record) -> str:
    """`kl.py`: milliseconds, over those of the products, peak and errors, forward and backward together."""
    lines = []
    for result in record["results"]:
        lines.append([f"*{result['direction']}*", *[""] * 6])
        for row in sorted(result["rows"], key=lambda row: float(row["median_ms"])):
            if row["mode"] == "backward":
                name, way = row["name"], row["name"].partition(", ")[2]
                if row["kind"] == "ours":
                    name = f"**logitless, {way}**" if way else "**logitless**"
                found = (row["errors"].get(key) for key in ("mean", "divergence", "d_weight"))
                errors = ["–" if error is None else f"{error:.1e}" for error in found]
                peak = "–" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
                lines.append([name, f"{row['median_ms']:.1f}", f"{row['ratio']:.2f}", peak, *errors])
        lines += [[f"not run: {name}, {reason}", *[""] * 6] for name, reason in result["not_run"].items()]
    header = ["forward + backward", "ms", "× products", "peak GiB"]
    header += ["error of the mean, nats", "largest of a token", "d_weight, relative"]
    return _setting(record) + markdown(header, lines)


def kept_sets(record: Record) -> str:
    """`kept_sets.py`: milliseconds of the forward, over those of the plain one, by the size of the logits."""
    lines = []
    for result in record["results"]:
        lines.append([f"*logits of standard deviation {result['std']:g}*", *[""] * 3])
        for row in (row for row in result["rows"] if row["mode"] == "forward"):
            kept = f"{result['kept_tokens'][row['set']]:,.0f}"
            name = row["name"].replace(record["backend"], "**logitless**")
            lines.append([name, kept, f"{row['median_ms']:.1f}", f"{row['ratio']:.2f}"])
    return _setting(record) + markdown(["forward", "kept, median", "ms", "× plain"], lines)


KINDS = {"steps": steps, "checked": checked, "engine": engine, "divergences": divergences, "kept-sets": kept_sets}
KINDS |= {"times": times, "all-times": all_times, "ratios": ratios, "errors": errors, "against-logits": against_logits}
KINDS["setting"] = setting


def joined(files: str) -> Record:
    """One record of several files: shapes that the first lacks, and rows that its shapes lack, from the others."""
    first, *others = (json.loads((RESULTS / file).read_text()) for file in files.split("+"))
    for other in others:
        if other["device"] != first["device"] or other["dtype"] != first["dtype"]:
            sys.exit(f"{files}: measured on {first['device']} and {other['device']}; they make no one table")
        for name, shape in other["shapes"].items():
            mine = first["shapes"].setdefault(name, {**shape, "rows": []})
            have = {(row["name"], row["mode"]) for row in mine["rows"]}
            mine["rows"] += [row for row in shape["rows"] if (row["name"], row["mode"]) not in have]
            mine["not_run"] = {**shape["not_run"], **mine["not_run"]}
    if "shapes" in first:
        first["shapes"] = dict(sorted(first["shapes"].items(), key=lambda item: ORDER.find(f" {item[0]} ")))
    return first


def rewritten(text: str) -> str:
    """A page with its tables made anew."""

    def table(found: re.Match[str]) -> str:
        opening, kind, files, names, closing = found.groups()
        record = joined(files)
        if names is not None:
            record["shapes"] = {name: record["shapes"][name] for name in names.split(",")}
        return opening + KINDS[kind](record) + closing

    return REGION.sub(table, text)


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for page in (ROOT / name for name in PAGES):
        text = page.read_text()
        if (new := rewritten(text)) != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(new)
    print("\n".join(stale) or "all tables are current")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    run()
