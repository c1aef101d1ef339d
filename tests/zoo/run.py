"""The zoo: every causal language model of the installed transformers, tiny, bound, and compared with its own logits.

    python tests/zoo/run.py [--only REGEX] [--jobs N] [--output docs/heads.md]

Each class has a process of its own, so that a crash or an endless loop costs one row. The exit code is 1 if any class
is wrong. Without `--only`, the table is written.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

NAMES = re.compile(r"^class (\w+(?:ForCausalLM|LMHeadModel|ForConditionalGeneration))\(", re.MULTILINE)
CPU_SECONDS, SECONDS, BYTES = 60, 600, 12 << 30  # for each class
ORDER = ("wrong", "right", "refused", "not run", "not built")
MEANING = {
    "right": "log-probabilities, entropies and the gradients of all parameters equal those of its own logits",
    "wrong": "scores or gradients differ from those of its own logits; there must be none",
    "refused": "`bind` raises with the reason, and the model is as it was",
    "not run": "its own forward gives no logits for text alone",
    "not built": "no tiny model of it could be made here",
}


def classes() -> Iterator[tuple[str, str]]:
    """(module, class) of every model with a language model's head."""
    models = Path(transformers.__file__).parent / "models"
    for path in sorted(models.glob("*/modeling_*.py")):
        for name in NAMES.findall(path.read_text(encoding="utf-8")):
            if path.parent.name != "auto":
                yield f"transformers.models.{path.parent.name}.{path.stem}", name


def _child(pipe: Connection, module: str, name: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    from verdict import judge  # here, so that the parent need not load it all

    try:
        pipe.send(judge(module, name))
    except BaseException as error:
        pipe.send({"name": name, "verdict": "not run", "reason": f"{type(error).__name__}: {error}"})


def in_a_process(task: tuple[str, str]) -> dict[str, Any]:
    """One class's verdict, whatever its code does to the process."""
    module, name = task
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, module, name))
    process.start()
    theirs.close()
    reason = f"it took more than {SECONDS} s"
    found = None
    if ours.poll(SECONDS):
        try:
            found = ours.recv()
        except EOFError:
            process.join()
            reason = f"its process ended with {process.exitcode}; it may use {CPU_SECONDS} s of processor time"
    process.kill()
    process.join()
    return found or {"name": name, "verdict": "not run", "reason": reason}


def _cell(text: object) -> str:
    plain = re.sub(r"\s+", " ", str(text)).replace("|", "\\|").replace("<", "&lt;").strip()
    return plain if len(plain) <= 300 else plain[:297] + "…"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def page(rows: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    counts = Counter(row["verdict"] for row in rows)
    lines = [
        "# Heads of Hugging Face models",
        "",
        "Written by the script of `nox -s zoo`"
        f" with transformers {version('transformers')} and torch {torch.__version__}: every "
        "`*ForCausalLM`, `*LMHeadModel` and `*ForConditionalGeneration` class, built tiny, its scales, caps, biases "
        "and buffers perturbed and its head multiplied by 20, bound, and compared with its own logits on text, in eval "
        "and in train mode.",
        "",
        *(f"- **{counts[verdict]} {verdict}**: {MEANING[verdict]}." for verdict in ORDER),
        "",
        "*Transform*: what `bind` found between the head's product and the logits. *Score error*: the largest of any "
        "log-probability or entropy, nats. *Gradient error*: the largest of any parameter's gradient, relative to its "
        "largest element. *Plain head*: how far off log-probabilities of `hidden @ weight.T` alone would be, nats.",
    ]
    for verdict in ORDER:
        chosen = sorted((row for row in rows if row["verdict"] == verdict), key=lambda row: row["name"].lower())
        if not chosen:
            continue
        lines += ["", f"## {verdict.capitalize()}", ""]
        if verdict in ("right", "wrong"):
            lines += [
                "| class | transform | dtype | score error | gradient error | plain head |",
                "|---|---|---|---|---|---|",
            ]
            for row in chosen:
                errors = (_number(row[key]) for key in ("score_error", "gradient_error", "untransformed"))
                lines.append(f"| {row['name']} | {row['transform']} | {row['dtype']} | {' | '.join(errors)} |")
        else:
            lines += ["| class | reason |", "|---|---|"]
            lines += [f"| {row['name']} | {_cell(row['reason'])} |" for row in chosen]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="a regular expression of whole class names; prints and writes nothing")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[2] / "docs/heads.md")
    options = parser.parse_args()
    tasks = [task for task in classes() if not options.only or re.fullmatch(options.only, task[1])]
    multiprocessing.get_context("forkserver").set_forkserver_preload(["warm"])
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(in_a_process, tasks):
            rows.append(row)
            told = row.get("transform") or row.get("reason")
            print(
                row["name"],
                row["verdict"],
                _cell(told),
                _number(row.get("score_error")),
                _number(row.get("gradient_error")),
                flush=True,
            )
    counts = Counter(row["verdict"] for row in rows)
    print(*(f"{verdict}: {counts[verdict]}" for verdict in ORDER), sep=", ")
    if not options.only:
        options.output.write_text(page(rows), encoding="utf-8")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
