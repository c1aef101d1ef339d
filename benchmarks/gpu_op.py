"""The op on a CUDA GPU against cuBLAS's time for the same products: correctness first, then medians.

    python benchmarks/gpu_op.py [--sizes S1 S2 S3 S4 S5] [--rounds 15] [--output results/NAME.json]

Limits, each measured in the same rounds: 2NDV (the logits alone), 8NDV (logits, logits again, both gradients), 6NDV
(logits once). Candidates run once a round in random order, so that a card that slows down is slow to all alike; a
short wait on the device precedes each, as earlier layers do in training, so that launches overlap with it (not so what
follows the one copy to the host that validate=True makes). The inputs are random bfloat16; both outputs have upstream
gradients except where the name says otherwise. Peers run at their defaults if they are installed; one that cannot run
is listed with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import random
import statistics
import sys
import types
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

import logitless
from logitless.testing.example import random_example
from logitless.testing.tolerance import check_results

SIZES = {  # tokens, hidden size, vocab rows
    "S1": (8192, 4096, 151936),
    "S2": (8192, 2048, 151936),
    "S3": (4096, 8192, 128256),
    "S4": (16384, 1536, 151936),
    "S5": (2048, 3584, 256000),
    "L": (65536, 4096, 151936),
    "N256": (256, 4096, 151936),
    "N1024": (1024, 4096, 151936),
    "N2048": (2048, 4096, 151936),
}
WAIT_CYCLES = 4_000_000  # about 2 ms
LIMITS = {"forward": "cublas 2NDV", "recompute": "cublas 8NDV"}  # all others: 6NDV
DISTS = ("triton", "logitless", "logitless-triton", "trl", "verl")
Run = Callable[[], object]


def gate(backend: str) -> None:
    """Stop here if the backend computes something else: odd sizes, every dtype, peaked logits, both ways of keeping."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens, hidden_size, vocab, std in ((301, 200, 1500, 2.0), (77, 129, 50257, 5.0), (1000, 512, 5000, 12.0)):
            example = random_example(
                tokens, vocab=vocab, hidden_size=hidden_size, dtype=dtype, device="cuda", std=std, softcap=None
            )
            truth = example.truth()
            for options in ({}, {"keep_bytes": 1 << 30}, {"keep_bytes": tokens * vocab}):
                try:
                    check_results(example.run(backend=backend, **options), example, truth=truth)
                except AssertionError as error:
                    sys.exit(f"{dtype} N {tokens} D {hidden_size} V {vocab} std {std} {options}: {error}; not timed")


def trl_chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if importlib.util.find_spec("datasets") is None:  # its backward imports the trainer's helpers for one of them
        helpers = types.ModuleType("trl.trainer.utils")
        helpers.maybe_gather_lm_head_ctx = lambda *args: contextlib.nullcontext()  # type: ignore[attr-defined]
        sys.modules.setdefault("trl.trainer", types.ModuleType("trl.trainer"))
        sys.modules.setdefault("trl.trainer.utils", helpers)
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    out = ChunkedLogProbFunction.apply(hidden, weight, None, labels, 1.0, 8192, None, 1.0, ("entropy",))
    return out[0], out[1]


def verl_triton(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if "verl" not in sys.modules:
        spec = importlib.util.find_spec("verl")
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError("verl is not installed")
        root = Path(next(iter(spec.submodule_search_locations)))
        for name in ("verl", "verl.utils", "verl.utils.kernel"):  # whose own imports want a serving stack
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    module = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    return module.linear_cross_entropy(hidden, weight, labels, 1.0, "none", None)


PEERS = {"TRL chunked": trl_chunked, "verl Triton": verl_triton}


class Case:
    """One size's inputs, and what is run on them."""

    def __init__(self, name: str, backend: str) -> None:
        n, d, v = SIZES[name]
        self.name, self.backend = name, backend
        noise = torch.Generator(device="cuda").manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=noise)

        self.hidden = randn(n, d).requires_grad_()
        self.weight = (randn(v, d) * d**-0.5).requires_grad_()
        self.labels = torch.randint(v, (n,), device="cuda", generator=noise)
        self.g, self.e = (torch.randn(n, device="cuda", generator=noise) for _ in range(2))
        self.everything = 3 * n * v
        self.logits: Tensor | None = None
        self.differences: dict[str, float] = {}  # max |Δlog_prob| of each peer from ours, nats

    def cublas(self, products: int) -> Run:
        """The products alone, into a buffer for the logits."""

        def run() -> None:
            h, w = self.hidden.detach(), self.weight.detach()
            if self.logits is None:
                self.logits = torch.randn(h.shape[0], w.shape[0], device="cuda", dtype=h.dtype)
            for _ in range(products // 2 if products == 2 else products // 2 - 2):
                torch.mm(h, w.T, out=self.logits)
            if products > 2:
                torch.mm(self.logits, w)
                torch.mm(self.logits.T, h)

        return run

    def forward(self, **options: object) -> Run:
        def run() -> None:
            with torch.no_grad():
                logitless.linear_log_probs(self.hidden, self.weight, self.labels, backend=self.backend, **options)

        return run

    def both(self, *, labels: Tensor | None = None, **options: object) -> Run:
        def run() -> None:
            self.hidden.grad = self.weight.grad = None
            out = logitless.linear_log_probs(
                self.hidden, self.weight, self.labels if labels is None else labels, backend=self.backend, **options
            )
            outputs, upstream = [out.log_probs], [self.g]
            if out.entropy is not None and out.entropy.requires_grad:
                outputs, upstream = [*outputs, out.entropy], [*upstream, self.e]
            torch.autograd.backward(outputs, upstream)

        return run

    def single_pass(self, workspace_bytes: int) -> Run:
        def loss_fn(scores: logitless.TokenLogProbs, index: Tensor) -> Tensor:
            assert scores.entropy is not None
            return self.g[index] * scores.log_probs + self.e[index] * scores.entropy

        def run() -> None:
            self.hidden.grad = self.weight.grad = None
            loss, _ = logitless.linear_policy_loss(
                self.hidden, self.weight, self.labels, loss_fn, backend=self.backend, workspace_bytes=workspace_bytes
            )
            loss.backward()

        return run

    def peers(self) -> tuple[dict[str, Run], dict[str, str]]:
        """Those that can run here, and of the others the reason."""
        runs: dict[str, Run] = {}
        missing: dict[str, str] = {}
        ours = logitless.linear_log_probs(self.hidden.detach(), self.weight.detach(), self.labels, backend=self.backend)
        for name, peer in PEERS.items():
            try:
                scores = peer(self.hidden, self.weight, self.labels)
                torch.autograd.backward(scores, (self.g, self.e))
                log_probs = scores[0].detach()
            except Exception as error:
                missing[name] = f"{type(error).__name__}: {error}"[:300]
                continue
            self.differences[name] = float((log_probs - ours.log_probs).abs().max())

            def forward(peer: Callable[..., tuple[Tensor, Tensor]] = peer) -> None:
                with torch.no_grad():
                    peer(self.hidden, self.weight, self.labels)

            def both(peer: Callable[..., tuple[Tensor, Tensor]] = peer) -> None:
                self.hidden.grad = self.weight.grad = None
                torch.autograd.backward(peer(self.hidden, self.weight, self.labels), (self.g, self.e))

            runs[f"forward, {name}"] = forward
            runs[f"both, {name}"] = both
        return runs, missing

    def candidates(self) -> dict[str, Run]:
        """By name; each is compared with the limit that `LIMITS` names."""
        keep = self.everything
        half = torch.where(torch.arange(len(self.labels), device="cuda") % 2 == 0, -100, self.labels)
        tenth = torch.where(torch.arange(len(self.labels), device="cuda") % 10 != 0, -100, self.labels)
        runs = {
            "cublas 2NDV": self.cublas(2),
            "cublas 6NDV": self.cublas(6),
            "cublas 8NDV": self.cublas(8),
            "forward": self.forward(),
            "forward, unvalidated": self.forward(validate=False),
            "recompute": self.both(),
            "recompute, unvalidated": self.both(validate=False),
            "kept": self.both(keep_bytes=keep),
            "kept, entropy_grad=False": self.both(keep_bytes=keep, entropy_grad=False),
            "single pass": self.single_pass(512 << 20),
            "single pass, 1.25 GiB": self.single_pass(5 << 28),
        }
        if self.name == "S1":
            runs["recompute, half ignored"] = self.both(labels=half)
            runs["recompute, nine tenths ignored"] = self.both(labels=tenth)
            runs["kept, half of it"] = self.both(keep_bytes=keep // 3)
        return runs


def peak(run: Run) -> float:
    """GiB beyond what was there before, gradients included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(case: Case, runs: dict[str, Run], rounds: int) -> dict[str, dict[str, object]]:
    """Medians, quartiles, ratios to the limits, and peaks."""
    peaks = {}
    for name, run in runs.items():
        run()
        case.hidden.grad = case.weight.grad = None
        peaks[name] = peak(run)
        case.hidden.grad = case.weight.grad = None
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(WAIT_CYCLES)
            start.record()
            runs[name]()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop))
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        name: {
            "median_ms": medians[name],
            "quartiles_ms": statistics.quantiles(times[name], n=4)[::2],
            "ratio": medians[name] / medians[LIMITS.get(name.split(",")[0], "cublas 6NDV")],
            "peak_gib": peaks[name],
        }
        for name in runs
    }


def _version(dist: str) -> str | None:
    try:
        return version(dist)
    except PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["S1", "S2", "S3", "S4", "S5"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    random.seed(0)
    gate(args.backend)
    print("correct: bfloat16, float16 and float32 within the contract", flush=True)
    record = {
        "date": date.today().isoformat(),
        "card": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            **{name: _version(name) for name in DISTS},
        },
        "dtype": "bfloat16",
        "backend": args.backend,
        "rounds": args.rounds,
        "sizes": {name: SIZES[name] for name in args.sizes},
        "results": {},
        "peers_not_run": {},
        "peers_max_difference_nats": {},
    }
    for name in args.sizes:
        case = Case(name, args.backend)
        peers, missing = case.peers()
        found = measure(case, {**case.candidates(), **peers}, args.rounds)
        record["results"][name] = found  # type: ignore[index]
        record["peers_not_run"][name] = missing  # type: ignore[index]
        record["peers_max_difference_nats"][name] = case.differences  # type: ignore[index]
        n, d, v = SIZES[name]
        print(f"{name}: N {n}, D {d}, V {v}, medians of {args.rounds}")
        for what, row in found.items():
            print(
                f"  {what:32s} {row['median_ms']:8.2f} ms {row['ratio']:6.3f}x {row['peak_gib']:6.2f} GiB", flush=True
            )
        del case
        torch.cuda.empty_cache()
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
