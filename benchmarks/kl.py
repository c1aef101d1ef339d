"""`linear_kl` against TRL's chunked divergence, Liger's fused linear JSD, full logits and the matrix products alone.

python benchmarks/kl.py [--shape s1] [--backend triton] [--directions forward,reverse,jsd] [--json kl.json]

Of every candidate the first tokens of the call that is timed are compared with the reference in float64: divergences
and d_hidden, and d_weight from a call on those tokens alone. A candidate that computes something else is not timed;
ours stops the run. The loss is the mean over tokens, since Liger gives no other: its error is told of that mean, and
of the others both that of the mean and the largest of a token.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitless import LMHead, linear_kl, reference
from logitless.bench.candidates import Candidate, Outcome
from logitless.bench.inputs import SHAPES, Inputs, Shape
from logitless.bench.peers import dist_version, why_not
from logitless.bench.record import machine
from logitless.bench.timing import measure, peak_gib

DIRECTIONS = ("forward", "reverse", "jsd")
BETA = {"forward": 0.0, "reverse": 1.0, "jsd": 0.5}  # as TRL and Liger call the directions
TOKENS = 64  # that are compared with float64
ALLOWED = {"ours": (1e-3, 2.0**-7), "peer": (0.25, 0.05), "logits": (0.25, 0.05)}  # nats; relative L2

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""hidden [N, D], weight [V, D], ref_hidden [N, E], ref_weight [V, E] to divergences [N], or their mean []."""


@dataclass
class Case:
    """Tensors of one size; the reference is another model of its own width."""

    student: Inputs
    teacher: Inputs

    @classmethod
    def make(cls, shape: Shape, ref_hidden: int, dtype: torch.dtype, device: torch.device) -> Case:
        student = Inputs(shape, dtype, device)
        teacher = Inputs(Shape("teacher", shape.tokens, ref_hidden, shape.vocab), dtype, device)
        noise = torch.Generator(device=device).manual_seed(1)  # the same seed would give the same model
        with torch.no_grad():
            for tensor in (teacher.hidden, teacher.weight):
                size = tensor.std()
                tensor.normal_(generator=noise).mul_(size)
        teacher.hidden.requires_grad_(False)
        teacher.weight.requires_grad_(False)
        return cls(student, teacher)

    def run(self, function: Function, backward: bool, tokens: int | None = None) -> Outcome:
        """Divergences, and gradients of their mean; of the first tokens only, if so many are given."""
        s, t, some = self.student, self.teacher, slice(tokens)
        s.hidden.grad = s.weight.grad = None
        with torch.set_grad_enabled(backward):
            value = function(s.hidden[some], s.weight, t.hidden[some], t.weight)
            if backward:
                torch.autograd.backward(value.mean())
        return Outcome(value.detach(), None, s.hidden.grad, s.weight.grad)


def _ours(backend: str, direction: str, keep_bytes: int = 0) -> Function:
    options: dict[str, Any] = {"direction": direction, "backend": backend, "keep_bytes": keep_bytes}

    def run(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
        return linear_kl(hidden, weight, ref_hidden, ref_weight, **options)

    return run


def _full(direction: str) -> Function:
    """Logits in the inputs' dtype, then the definition in float32."""

    def run(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
        log_p, log_q = ((h @ w.T).float().log_softmax(-1) for h, w in ((hidden, weight), (ref_hidden, ref_weight)))
        if direction == "jsd":
            log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
            sides = ((log_q.exp() * (log_q - log_m)).sum(-1), (log_p.exp() * (log_p - log_m)).sum(-1))
            return 0.5 * (sides[0] + sides[1])
        a, b = (log_q, log_p) if direction == "forward" else (log_p, log_q)
        return (a.exp() * (a - b)).sum(-1)

    return run


def _trl(direction: str) -> Function:
    if importlib.util.find_spec("datasets") is None:  # it imports one helper from the trainer's
        helpers: Any = types.ModuleType("trl.trainer.utils")
        helpers.maybe_gather_lm_head_ctx = lambda *args: contextlib.nullcontext()
        sys.modules.setdefault("trl.trainer", types.ModuleType("trl.trainer"))
        sys.modules.setdefault("trl.trainer.utils", helpers)
    function = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction

    def run(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
        value: Tensor = function.apply(hidden, weight, None, ref_hidden, ref_weight, None, BETA[direction])[0]
        return value

    return run


def _liger(direction: str) -> Function:
    function = importlib.import_module("liger_kernel.ops.fused_linear_jsd").LigerFusedLinearJSDFunction

    def run(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
        value: Tensor = function.apply(hidden, weight, ref_hidden, ref_weight, None, BETA[direction])
        return value

    return run


PEERS = {
    "full logits, eager": ("logits", "torch", _full),
    "TRL chunked divergence": ("peer", "trl", _trl),
    "Liger fused linear JSD": ("peer", "liger-kernel", _liger),
}


def _products(case: Case, logits: int, gradients: bool) -> Callable[[], Outcome]:
    """So many times both heads' logits, and the student's two gradients."""
    s, t = case.student, case.teacher

    def run() -> Outcome:
        z = None
        for _ in range(logits):
            for one in (t, s):
                z = torch.mm(one.hidden.detach(), one.weight.detach().T)
        assert z is not None
        if not gradients:
            return Outcome(z, None)
        return Outcome(z, None, z @ s.weight.detach(), z.T @ s.hidden.detach())

    return run


def _errors(case: Case, function: Function, direction: str, device: torch.device) -> dict[str, float]:
    """Of the first tokens, in nats: of the mean divergence, and the largest of one; of gradients, relative L2."""
    tokens, s, t = min(TOKENS, case.student.shape.tokens), case.student, case.teacher
    leaves = [x.detach()[:tokens].double().requires_grad_() for x in (s.hidden,)]
    leaves.append(s.weight.detach().double().requires_grad_())
    truth = reference.linear_kl(
        leaves[0],
        LMHead(leaves[1]),
        t.hidden[:tokens].double(),
        LMHead(t.weight.double()),
        direction=direction,
    )
    d_hidden, d_weight = torch.autograd.grad(truth.mean(), leaves)
    whole = case.run(function, True)
    assert whole.d_hidden is not None
    share = s.shape.tokens / tokens
    found = {"d_hidden": _relative(whole.d_hidden[:tokens] * share, d_hidden)}
    few = case.run(function, True, tokens)
    assert few.d_weight is not None
    found["d_weight"] = _relative(few.d_weight, d_weight)
    found["mean"] = float((few.log_probs.double().mean() - truth.detach().mean()).abs())
    if whole.log_probs.ndim:
        found["divergence"] = float((whole.log_probs[:tokens].double() - truth.detach()).abs().max())
    return found


def _relative(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def _candidates(case: Case, backend: str, direction: str) -> Iterator[tuple[str, str, Function | str]]:
    """Name, kind, and the function or why there is none."""
    yield backend, "ours", _ours(backend, direction)
    enough = 16 * case.student.shape.tokens * (case.student.shape.vocab + 128)  # a backend keeps what it has a use for
    yield f"{backend}, all kept", "ours", _ours(backend, direction, enough)
    for name, (kind, dist, load) in PEERS.items():
        if dist_version(dist) is None:
            yield name, kind, f"not installed; pip install {dist}"
            continue
        try:
            yield name, kind, load(direction)
        except Exception as error:  # whatever another package's import raises is its reason
            yield name, kind, why_not(error)


def _measured(case: Case, args: argparse.Namespace, direction: str, device: torch.device) -> dict[str, Any]:
    sweeps = 2 if direction == "jsd" else 1
    rows: list[tuple[Candidate, dict[str, float], float | None]] = []
    refused: dict[str, str] = {}
    for mode, times, gradients in (("forward", sweeps, False), ("backward", sweeps + 1, True)):
        name = f"products, {'both heads once' if times == 1 else f'both heads {times}×'}"
        name += " and gradients" if gradients else ""
        rows.append((Candidate(name, "limit", mode, mode, _products(case, times, gradients)), {}, None))  # type: ignore[arg-type]
    for name, kind, function in _candidates(case, args.backend, direction):
        if isinstance(function, str):
            refused[name] = function
            continue
        try:
            errors = _errors(case, function, direction, device)
        except Exception as error:
            if kind == "ours":
                raise
            refused[name] = why_not(error)
            continue
        nats, relative = ALLOWED[kind]
        wrong = {key: x for key, x in errors.items() if not x <= (relative if key.startswith("d_") else nats)}
        if wrong and kind == "ours":
            raise SystemExit(f"{name} ({direction}): off by {wrong}; nothing is timed")
        if wrong:
            refused[name] = f"off by {wrong}, so it was not timed"
            continue
        for mode in ("forward", "backward"):
            run = partial(case.run, function, mode == "backward")
            case.student.hidden.grad = case.student.weight.grad = None  # else they count as having been there before
            rows.append((Candidate(name, kind, mode, mode, run), errors, peak_gib(run, device)))  # type: ignore[arg-type]
    timed = measure([row[0] for row in rows], device, args.rounds, args.seconds)
    limits = {row[0].mode: m.median_ms for row, m in zip(rows, timed, strict=True) if row[0].kind == "limit"}
    found = [
        {
            "name": candidate.name,
            "kind": candidate.kind,
            "mode": candidate.mode,
            "median_ms": m.median_ms,
            "quartiles_ms": list(m.quartiles_ms),
            "rounds": m.rounds,
            "ratio": m.median_ms / limits[candidate.mode],
            "peak_gib": peak,
            "errors": errors,
        }
        for (candidate, errors, peak), m in zip(rows, timed, strict=True)
    ]
    return {"direction": direction, "rows": found, "not_run": refused}


def _show(result: dict[str, Any]) -> None:
    print(f"\n{result['direction']}: medians of {result['rows'][0]['rounds']} rounds; errors against float64")
    for row in sorted(result["rows"], key=lambda row: (row["mode"] != "forward", row["median_ms"])):
        errors = ", ".join(f"{key} {value:.2g}" for key, value in row["errors"].items())
        peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:7.2f} GiB"
        time = f"{row['median_ms']:9.2f} ms  {row['ratio']:5.2f}×"
        print(f"  {row['mode']:8s} {row['name']:42s} {time} {peak}  {errors}")
    for name, reason in result["not_run"].items():
        print(f"  not run: {name}: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Divergences of two heads, timed behind a gate.")
    parser.add_argument("--shape", default="s1" if torch.cuda.is_available() else "small", choices=SHAPES)
    parser.add_argument("--ref-hidden", type=int, help="the reference's hidden size; the student's, if not given")
    parser.add_argument("--tokens", type=int, help="another number of tokens than the shape's")
    parser.add_argument("--vocab", type=int, help="another vocabulary than the shape's")
    parser.add_argument("--directions", default=",".join(DIRECTIONS))
    parser.add_argument("--backend", default="triton" if torch.cuda.is_available() else "torch")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each direction, at most, after three rounds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    named = SHAPES[args.shape]
    shape = Shape(named.name, args.tokens or named.tokens, named.hidden, args.vocab or named.vocab)
    ref_hidden = args.ref_hidden or shape.hidden
    case = Case.make(shape, ref_hidden, getattr(torch, args.dtype), device)
    about = machine(device)
    print(f"{shape.tokens} tokens, D {shape.hidden} and {ref_hidden}, V {shape.vocab}, {args.dtype}, ", end="")
    print(f"{about['device']['name']}; " + ", ".join(f"{dist} {v}" for dist, v in about["versions"].items() if v))
    results = []
    for direction in args.directions.split(","):
        results.append(_measured(case, args, direction, device))
        _show(results[-1])
    if args.json:
        size = {"tokens": shape.tokens, "hidden": shape.hidden, "ref_hidden": ref_hidden, "vocab": shape.vocab}
        record = {**about, "dtype": args.dtype, **size, "results": results}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
