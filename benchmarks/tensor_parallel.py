"""`linear_log_probs` with the vocabulary over two GPUs, against one GPU and half of the matrix products.

    python benchmarks/tensor_parallel.py [--shapes s1,s3,s5] [--rounds 11] [--output results/NAME.json]

One process a GPU, over NCCL; `--device cpu --shapes small` tries the script itself over gloo. Both ranks run everything
at the same time, what needs one GPU too, so that all figures are of two GPUs that are both busy. A figure is the median
over rounds of the slower rank's time; every run of this op is first held to the reference in float64. Communication is
counted where this op hands it to torch.distributed. NVLink multicast is left off (NCCL_NVLS_ENABLE=0).
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import logitless
from logitless.bench.candidates import Candidate, Outcome, forward_and_backward, products
from logitless.bench.gate import Gate
from logitless.bench.inputs import Inputs, Shape, chosen_shapes
from logitless.bench.record import machine
from logitless.bench.timing import clock, peak_gib

RANKS = 2
TIMEOUT = datetime.timedelta(minutes=3)
WAYS: dict[str, tuple[Any, str, dict[str, Any]]] = {  # mode, the products it cannot do without, options
    "forward": ("forward", "2NDV", {}),
    "recompute": ("backward", "8NDV", {}),
    "kept": ("backward", "6NDV", {"keep_bytes": 1 << 40}),
}
STATISTICS = 4  # of a token: maximum, Σexp, Σexp·z, the label's logit, each in float32


class Ranks:
    """One size on this rank: the whole head, this rank's rows of it, and all that is run."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.whole = Inputs(shape, dtype, device)
        self.half = copy.copy(self.whole)
        self.half.weight = self.whole.weight.detach().chunk(RANKS)[dist.get_rank()].clone().requires_grad_()

    def one(self, way: str) -> Outcome:
        """With the whole head on this GPU."""
        mode, _, options = WAYS[way]
        return forward_and_backward(self.whole, mode, partial(score, **options))

    def two(self, way: str) -> Outcome:
        """With this rank's rows of the head; d_weight is theirs."""
        mode, _, options = WAYS[way]
        return forward_and_backward(self.half, mode, partial(score, tp_group=dist.group.WORLD, **options))

    def gathered(self, way: str) -> Outcome:
        """`two` on the whole's labels and upstream gradients, with all ranks' d_weight, for the gate."""
        names = ("labels", "grad_log_probs", "grad_entropy")
        with mock.patch.multiple(self.half, **{name: getattr(self.whole, name) for name in names}):
            found = self.two(way)
        if found.d_weight is None:
            return found
        parts = [torch.empty_like(found.d_weight) for _ in range(RANKS)]
        dist.all_gather(parts, found.d_weight)
        return replace(found, d_weight=torch.cat(parts))

    def check(self) -> dict[str, dict[str, float]]:
        """Errors of each way on two GPUs against float64; raises where one is outside of the contract."""
        gate = Gate(self.whole)
        return {
            way: gate.check(Candidate(f"two GPUs, {way}", "ours", mode, limit, partial(self.gathered, way)))
            for way, (mode, limit, _) in WAYS.items()
        }

    def runs(self) -> dict[str, Callable[[], object]]:
        """All that is timed, by name."""
        found: dict[str, Callable[[], object]] = {}
        for way in WAYS:
            found[f"one GPU, {way}"] = partial(self.one, way)
            found[f"two GPUs, {way}"] = partial(self.two, way)
        return found | {f"half of the products, {one.limit}": one.run for one in products(self.half)}

    def least_bytes(self, way: str) -> int:
        """What a rank must send so that the other knows its statistics and, in float32, its part of d_hidden."""
        shape, backward = self.whole.shape, WAYS[way][0] == "backward"
        return 4 * shape.tokens * (STATISTICS + (shape.hidden if backward else 0))


def score(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    out = logitless.linear_log_probs(hidden, weight, labels, **options)
    return out.log_probs, out.entropy


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Bytes that this rank sends by each collective within the block, as a ring of two sends them."""
    sent: list[int] = []

    def counting(collective: Callable[..., Any], operand: int) -> Callable[..., Any]:
        def run(*args: Any, **keywords: Any) -> Any:
            sent.append(args[operand].numel() * args[operand].element_size())
            return collective(*args, **keywords)

        return run

    operands = {"all_reduce": 0, "all_gather_into_tensor": 1, "all_gather_single": 1}
    present = {name: operand for name, operand in operands.items() if hasattr(dist, name)}
    with mock.patch.multiple(dist, **{name: counting(getattr(dist, name), at) for name, at in present.items()}):
        yield sent


def slowest(values: Tensor, host: Any) -> Tensor:
    dist.all_reduce(values, dist.ReduceOp.MAX, group=host)
    return values


def measure(ranks: Ranks, rounds: int, host: Any) -> dict[str, dict[str, Any]]:
    """Median and quartiles of each run's milliseconds, the slower rank's in each round, and its peak of memory."""
    runs = ranks.runs()
    peaks = {}
    for name, run in runs.items():
        run()
        dist.barrier(host)
        peaks[name] = peak_gib(run, ranks.device)
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0)  # alike on both ranks
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            dist.barrier(host)
            times[name].append(clock(runs[name], ranks.device)[0])
    figures = {}
    for name, taken in times.items():
        of_rounds = slowest(torch.tensor(taken, dtype=torch.float64), host).tolist()
        low, _, high = statistics.quantiles(of_rounds, n=4, method="inclusive")
        peak = float(slowest(torch.tensor(peaks[name], dtype=torch.float64), host))
        figures[name] = {"median_ms": statistics.median(of_rounds), "quartiles_ms": [low, high], "peak_gib": peak}
    return figures


def efficiencies(figures: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each way, against half of one GPU's time and against half of the products' time; 1 is best."""
    median = {name: figure["median_ms"] for name, figure in figures.items()}
    return {
        way: {
            "of_one_gpu": median[f"one GPU, {way}"] / RANKS / median[f"two GPUs, {way}"],
            "of_half_products": median[f"half of the products, {limit}"] / median[f"two GPUs, {way}"],
        }
        for way, (_, limit, _) in WAYS.items()
    }


def run_shape(shape: Shape, dtype: torch.dtype, device: torch.device, rounds: int, host: Any) -> dict[str, Any]:
    ranks = Ranks(shape, dtype, device)
    errors = ranks.check()
    sent = {}
    for way in WAYS:
        with counted_bytes() as by_collective:
            ranks.two(way)
        sent[way] = {"collectives": by_collective, "bytes": sum(by_collective), "least": ranks.least_bytes(way)}
    figures = measure(ranks, rounds, host)
    sizes = {"tokens": shape.tokens, "hidden": shape.hidden, "vocab": shape.vocab}
    return {**sizes, "errors": errors, "sent": sent, "runs": figures, "efficiency": efficiencies(figures)}


def one_rank(rank: int, args: argparse.Namespace, store: str) -> None:
    cuda = args.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=TIMEOUT,
        device_id=device if cuda else None,
    )
    host = dist.new_group(backend="gloo")
    dtype = getattr(torch, args.dtype)
    record = {**machine(device), "dtype": args.dtype, "rounds": args.rounds, "shapes": {}}
    if cuda:
        record["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for shape in chosen_shapes(args.shapes, None, None, None, device):
        found = run_shape(shape, dtype, device, args.rounds, host)
        record["shapes"][shape.name] = found
        if rank == 0:
            report(shape.name, found)
            if args.output:
                args.output.write_text(json.dumps(record, indent=1) + "\n")
        if cuda:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def report(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name}: {found['tokens']} tokens, D {found['hidden']}, V {found['vocab']}")
    for run, figure in found["runs"].items():
        low, high = figure["quartiles_ms"]
        print(f"  {run:30s}{figure['median_ms']:10.2f} ms  ({low:.2f}–{high:.2f}) {figure['peak_gib']:8.2f} GiB")
    for way, of in found["efficiency"].items():
        sent = found["sent"][way]
        print(
            f"  {way:10s} efficiency {of['of_one_gpu']:.3f} of one GPU, {of['of_half_products']:.3f} of half the "
            f"products; sent {sent['bytes'] / 2**20:.1f} MiB in {len(sent['collectives'])} collectives, "
            f"least {sent['least'] / 2**20:.1f} MiB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="s1,s3,s5")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < RANKS:
        raise SystemExit(
            f"got {torch.cuda.device_count()} GPUs, expected {RANKS}; --device cpu tries the script itself"
        )
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as folder:
        spawn(one_rank, (args, f"{folder}/store"), nprocs=RANKS)


if __name__ == "__main__":
    main()
