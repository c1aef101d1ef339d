"""The op on a CPU against the logits in full and TRL's chunked function: correctness first, then medians.

    python benchmarks/cpu_op.py [--rounds 5] [--tokens 2048 --hidden 576 --vocab 49152] [--output results/NAME.json]

Every candidate runs once a round, in turn, so that a noisy machine is noisy to all of them alike; processor time, with
OMP_NUM_THREADS=1, is what to look at where others use the cores. Shapes default to
2048 tokens of SmolLM2-135M (D 576, V 49152), float32, forward and backward with gradients of hidden and weight.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

import logitless
from logitless import LMHead, TokenLogProbs

Scores = tuple[Tensor, Tensor]
Candidate = Callable[[Tensor, Tensor, Tensor], Scores]
Step = Callable[[Tensor, Tensor, Tensor, Scores], Scores]
TRL_CHUNK = 32768  # what TRL 1.16 passes


def full_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Scores:
    log_p = (hidden @ weight.T).log_softmax(-1)
    log_prob = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return log_prob, -(log_p.exp() * log_p).sum(-1)


def ours(keep_bytes: int) -> Candidate:
    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> Scores:
        out = logitless.linear_log_probs(hidden, LMHead(weight), labels, keep_bytes=keep_bytes, backend="torch")
        assert out.entropy is not None
        return out.log_probs, out.entropy

    return run


def trl_chunked() -> Candidate:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> Scores:
        out = ChunkedLogProbFunction.apply(hidden, weight, None, labels, 1.0, TRL_CHUNK, None, 1.0, ("entropy",))
        return out[0], out[1]

    return run


def two_passes(candidate: Candidate) -> Step:
    def step(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Scores) -> Scores:
        scores = candidate(hidden, weight, labels)
        torch.autograd.backward(scores, upstream)
        return scores

    return step


def single_pass(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Scores) -> Scores:
    """A loss with the same upstream gradients, made chunk by chunk."""

    def loss_fn(scores: TokenLogProbs, index: Tensor) -> Tensor:
        assert scores.entropy is not None
        return upstream[0][index] * scores.log_probs + upstream[1][index] * scores.entropy

    loss, out = logitless.linear_policy_loss(hidden, weight, labels, loss_fn, backend="torch")
    loss.backward()
    assert out.entropy is not None
    return out.log_probs, out.entropy


def run(step: Step, hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Scores) -> list[Tensor]:
    hidden.grad = weight.grad = None
    scores = step(hidden, weight, labels, upstream)
    assert hidden.grad is not None
    assert weight.grad is not None
    return [*(score.detach() for score in scores), hidden.grad, weight.grad]


def gate(name: str, got: list[Tensor], expected: list[Tensor]) -> None:
    """Stop here if a candidate computes something else."""
    for what, a, b in zip(("log_probs", "entropy", "d_hidden", "d_weight"), got, expected, strict=True):
        error = float((a - b).abs().max() / b.abs().max())
        if not error < 1e-4:
            sys.exit(f"{name}: {what} differs from the full logits by {error:.2e} of its largest entry; not timed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()

    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, requires_grad=True)
    weight = (torch.randn(args.vocab, args.hidden) * args.hidden**-0.5).requires_grad_()
    labels = torch.randint(args.vocab, (args.tokens,))
    mostly_ignored = torch.where(torch.rand(args.tokens) < 0.9, -100, labels)
    upstream = (torch.randn(args.tokens), torch.randn(args.tokens))

    everything = args.tokens * args.vocab * 4
    runs: dict[str, tuple[Step, Tensor]] = {
        "full logits, eager": (two_passes(full_logits), labels),
        "logitless, recompute": (two_passes(ours(0)), labels),
        "logitless, all kept": (two_passes(ours(everything)), labels),
        "logitless, single pass": (single_pass, labels),
        "logitless, 90 % ignored": (two_passes(ours(0)), mostly_ignored),
    }
    not_run: dict[str, str] = {}
    try:
        runs["TRL, chunked"] = (two_passes(trl_chunked()), labels)
    except ImportError as error:
        not_run["TRL, chunked"] = f"not installed: {error}"

    expected = run(two_passes(full_logits), hidden, weight, labels, upstream)
    for name, (step, target) in runs.items():
        if target is labels:
            gate(name, run(step, hidden, weight, target, upstream), expected)

    seconds: dict[str, list[float]] = {name: [] for name in runs}
    busy_seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, (step, target) in runs.items():
            wall, busy = time.perf_counter(), time.process_time()
            run(step, hidden, weight, target, upstream)
            seconds[name].append(time.perf_counter() - wall)
            busy_seconds[name].append(time.process_time() - busy)

    medians = {name: statistics.median(times) for name, times in seconds.items()}
    busy_medians = {name: statistics.median(times) for name, times in busy_seconds.items()}
    base, busy_base = medians["full logits, eager"], busy_medians["full logits, eager"]
    print(f"N {args.tokens}, D {args.hidden}, V {args.vocab}, float32, {torch.get_num_threads()} threads, ", end="")
    print(f"forward + backward, medians of {args.rounds}")
    print(f"  {'':26s} {'wall':>9s}          {'processor time':>17s}")
    for name, median in medians.items():
        busy = busy_medians[name]
        print(f"  {name:26s} {median:7.3f} s  {median / base:5.2f}x  {busy:7.3f} s  {busy / busy_base:5.2f}x")
    for name, reason in not_run.items():
        print(f"  {name:26s} not run: {reason}")
    if args.output:
        record = {
            "date": date.today().isoformat(),
            "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
            "versions": {name: _version(name) for name in ("torch", "logitless", "logitless-torch", "trl")},
            "shape": {"tokens": args.tokens, "hidden": args.hidden, "vocab": args.vocab, "dtype": "float32"},
            "rounds": args.rounds,
            "median_seconds": medians,
            "median_processor_seconds": busy_medians,
            "seconds": seconds,
            "not_run": not_run,
        }
        args.output.write_text(json.dumps(record, indent=2) + "\n")


def _version(dist: str) -> str | None:
    try:
        return version(dist)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
