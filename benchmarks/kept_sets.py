"""Scores over a kept set (`top_k`, `top_p`) against the plain op of the same run, and against full logits.

python benchmarks/kept_sets.py [--shape s1] [--backend triton] [--sets k,p,k-p] [--std 5,1] [--json kept_sets.json]

How many tokens a set keeps decides what top_p costs, so logits of several sizes are timed: at a standard deviation of 5
some hundred of 151,936 hold 95 % of the mass, at 1 three quarters of them do. Labels are drawn from the whole
distribution: some are not in the set.

Of every candidate the first tokens of the call that is timed are compared with the reference in float64, and the
gradients that they alone make. Nothing is timed if ours is off; another function that is off is not timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import logitless
from logitless import LMHead, TokenLogProbs, reference
from logitless.bench.candidates import Candidate, Outcome
from logitless.bench.inputs import SHAPES, Inputs, Shape
from logitless.bench.peers import why_not
from logitless.bench.record import machine
from logitless.bench.timing import measure, peak_gib

SETS: dict[str, dict[str, Any]] = {
    "k": {"top_k": 50},
    "p": {"top_p": 0.95},
    "k-p": {"top_k": 50, "top_p": 0.95},
}
PLAIN = "plain"
TARGET = 1.4  # of the plain forward's time
TOKENS = 64  # that are compared with float64
# Nats beyond what one token more or less at the border makes, and gradients' relative L2 error.
ALLOWED = {"ours": (5e-4, 2.0**-7), "logits": (0.25, 0.1)}

Function = Callable[[Tensor, Tensor, Tensor], TokenLogProbs]
"""hidden [N, D], weight [V, D], labels [N] to scores [N]."""


def _inputs(shape: Shape, std: float, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Normal logits of a standard deviation, and labels drawn from their softmax."""
    inputs = Inputs(shape, dtype, device)
    noise = torch.Generator(device=device).manual_seed(2)
    with torch.no_grad():
        inputs.weight.mul_(std)
        for start in range(0, shape.tokens, 256):
            rows = slice(start, start + 256)
            p = (inputs.hidden[rows] @ inputs.weight.T).float().softmax(-1)
            inputs.labels[rows] = torch.multinomial(p, 1, generator=noise).squeeze(1)
    return inputs


def _ours(backend: str, kept: dict[str, Any]) -> Function:
    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> TokenLogProbs:
        return logitless.linear_log_probs(hidden, weight, labels, backend=backend, **kept)

    return run


def _full(kept: dict[str, Any]) -> Function:
    """Logits in the inputs' dtype, then the definition in float32."""

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> TokenLogProbs:
        return reference.scores_of((hidden @ weight.T).float(), labels, **kept)

    return run


def _run(inputs: Inputs, function: Function, backward: bool) -> Outcome:
    inputs.hidden.grad = inputs.weight.grad = None
    with torch.set_grad_enabled(backward):
        out = function(inputs.hidden, inputs.weight, inputs.labels)
        assert out.entropy is not None
        if backward:
            torch.autograd.backward([out.log_probs, out.entropy], [inputs.grad_log_probs, inputs.grad_entropy])
    return Outcome(out.log_probs.detach(), out.entropy.detach(), inputs.hidden.grad, inputs.weight.grad)


class _Truth:
    """Scores and gradients of the first tokens, in float64, and what a token at the border may change."""

    def __init__(self, inputs: Inputs, kept: dict[str, Any]) -> None:
        first = slice(min(TOKENS, inputs.shape.tokens))
        hidden = inputs.hidden.detach()[first].double().requires_grad_()
        weight = inputs.weight.detach().double().requires_grad_()
        self.scores = reference.linear_log_probs(hidden, LMHead(weight), inputs.labels[first], **kept)
        upstream = (inputs.grad_log_probs[first].double(), inputs.grad_entropy[first].double())
        assert self.scores.entropy is not None
        outputs = (self.scores.log_probs, self.scores.entropy)
        self.d_hidden, self.d_weight = torch.autograd.grad(outputs, (hidden, weight), upstream)
        with torch.no_grad():
            logits = hidden @ weight.T
            is_kept = reference.keep(logits, **kept)
            log_p = logits.masked_fill_(~is_kept, -float("inf")).log_softmax(-1)
            border = log_p.masked_fill_(~is_kept, float("inf")).amin(-1)
        self.size = float(is_kept.sum(-1).double().median())
        # One token more or less: its p, and of the entropy p·(1 − log p).
        self.border = (border.exp() * (1.0 - border)) if kept else torch.zeros_like(border)

    def errors(self, inputs: Inputs, function: Function) -> tuple[dict[str, float], dict[str, float]]:
        """The largest errors in nats and gradients' relative L2; the same, less what the border explains."""
        count = len(self.border)
        with inputs.only_first(count, labels=False):
            got = _run(inputs, function, True)
        assert got.entropy is not None
        assert got.d_hidden is not None
        assert got.d_weight is not None
        assert self.scores.entropy is not None
        pairs = {"log_probs": (got.log_probs, self.scores.log_probs), "entropy": (got.entropy, self.scores.entropy)}
        gradients = {
            "d_hidden": _relative(got.d_hidden[:count], self.d_hidden),
            "d_weight": _relative(got.d_weight, self.d_weight),
        }
        nats = {name: (mine[:count].double() - right.detach()).abs() for name, (mine, right) in pairs.items()}
        found = {name: float(error.amax()) for name, error in nats.items()}
        beyond = {name: float((error - 2.0 * self.border).amax()) for name, error in nats.items()}
        return {**found, **gradients}, {**beyond, **gradients}


def _relative(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def _gated(
    inputs: Inputs, backend: str, names: list[str]
) -> tuple[list[tuple[Candidate, dict[str, float], str]], dict[str, float], dict[str, str]]:
    """Candidates that compute what they should, with their errors and set; sizes of the sets; the others' reasons."""
    rows: list[tuple[Candidate, dict[str, float], str]] = []
    sizes, refused = {}, {}
    for name in (PLAIN, *names):
        kept = SETS.get(name, {})
        truth = _Truth(inputs, kept)
        sizes[name] = truth.size
        for kind, title, function in (
            ("ours", backend, _ours(backend, kept)),
            ("logits", "full logits, eager", _full(kept)),
        ):
            label = f"{title}, {name}"
            try:
                errors, beyond = truth.errors(inputs, function)
            except Exception as error:
                if kind == "ours":
                    raise
                refused[label] = why_not(error)
                continue
            nats, relative = ALLOWED[kind]
            wrong = {key: x for key, x in beyond.items() if not x <= (relative if key.startswith("d_") else nats)}
            if wrong and kind == "ours":
                raise SystemExit(f"{label}: off by {wrong}; nothing is timed")
            if wrong:
                refused[label] = f"off by {wrong}, so it was not timed"
                continue
            for mode in ("forward", "backward"):
                run = partial(_run, inputs, function, mode == "backward")
                rows.append((Candidate(label, kind, mode, PLAIN, run), errors, name))
    inputs.hidden.grad = inputs.weight.grad = None
    return rows, sizes, refused


def _peak(inputs: Inputs, candidate: Candidate, device: torch.device) -> float:
    inputs.hidden.grad = inputs.weight.grad = None  # else what the last run left counts as having been there before
    return peak_gib(candidate.run, device)


def _measured(inputs: Inputs, std: float, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    rows, sizes, refused = _gated(inputs, args.backend, args.sets.split(","))
    peaks = [_peak(inputs, row[0], device) for row in rows]
    timed = measure([row[0] for row in rows], device, args.rounds, args.seconds)
    plain = {
        row[0].mode: m.median_ms
        for row, m in zip(rows, timed, strict=True)
        if row[0].kind == "ours" and row[2] == PLAIN
    }
    found = [
        {
            "name": candidate.name,
            "kind": candidate.kind,
            "set": name,
            "mode": candidate.mode,
            "median_ms": m.median_ms,
            "quartiles_ms": list(m.quartiles_ms),
            "rounds": m.rounds,
            "ratio": m.median_ms / plain[candidate.mode],
            "peak_gib": peak,
            "errors": errors,
        }
        for (candidate, errors, name), m, peak in zip(rows, timed, peaks, strict=True)
    ]
    return {"std": std, "kept_tokens": sizes, "rows": found, "not_run": refused}


def _show(result: dict[str, Any]) -> None:
    print(f"\nlogits of standard deviation {result['std']}; medians of {result['rows'][0]['rounds']} rounds")
    print("  kept tokens, median: " + ", ".join(f"{name} {n:,.0f}" for name, n in result["kept_tokens"].items()))
    for row in sorted(result["rows"], key=lambda row: (row["mode"] != "forward", row["median_ms"])):
        errors = ", ".join(f"{key} {value:.2g}" for key, value in row["errors"].items())
        time = f"{row['median_ms']:9.2f} ms  {row['ratio']:5.2f}× plain  {row['peak_gib']:6.2f} GiB"
        verdict = ""
        if row["kind"] == "ours" and row["mode"] == "forward" and row["set"] != PLAIN:
            verdict = f"  {'meets' if row['ratio'] <= TARGET else 'MISSES'} {TARGET}×"
        print(f"  {row['mode']:8s} {row['name']:28s} {time}  {errors}{verdict}")
    for name, reason in result["not_run"].items():
        print(f"  not run: {name}: {reason}")


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Kept sets, timed behind a gate.")
    parser.add_argument("--shape", default="s1" if on_gpu else "small", choices=SHAPES)
    parser.add_argument("--tokens", type=int, help="another number of tokens than the shape's")
    parser.add_argument("--vocab", type=int, help="another vocabulary than the shape's")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--std", default="5,1", help="of the logits")
    parser.add_argument("--backend", default="triton" if on_gpu else "torch")
    parser.add_argument("--dtype", default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each size of logits, after three rounds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if unknown := set(args.sets.split(",")) - SETS.keys():
        parser.error(f"--sets: got {', '.join(sorted(unknown))}, expected some of {', '.join(SETS)}")
    device = torch.device("cuda" if on_gpu else "cpu")
    named = SHAPES[args.shape]
    shape = Shape(named.name, args.tokens or named.tokens, named.hidden, args.vocab or named.vocab)
    about = machine(device)
    print(f"{shape.tokens} tokens, D {shape.hidden}, V {shape.vocab}, {args.dtype}, {about['device']['name']}")
    print(", ".join(f"{dist} {version}" for dist, version in about["versions"].items() if version))
    results = []
    for std in map(float, args.std.split(",")):
        inputs = _inputs(shape, std, getattr(torch, args.dtype), device)
        results.append(_measured(inputs, std, args, device))
        _show(results[-1])
    if args.json:
        size = {"tokens": shape.tokens, "hidden": shape.hidden, "vocab": shape.vocab}
        record = {**about, "dtype": args.dtype, "backend": args.backend, **size, "sets": SETS, "results": results}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
