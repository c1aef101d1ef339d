"""What it costs to pack a batch: medians over many runs.

python benchmarks/packing.py [--sequences 64 --length 512 --runs 50]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from logitless import PackedBatch


def median_ms(function: Callable[[], object], runs: int) -> float:
    function()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="What it costs to pack a batch.")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--runs", type=int, default=50)
    args = parser.parse_args()
    ids = torch.randint(1, 1000, (args.sequences, args.length))
    full = torch.ones_like(ids)
    lengths = torch.randint(1, args.length + 1, (args.sequences, 1))
    ragged = (torch.arange(args.length) >= args.length - lengths).long()  # padded left
    batch = PackedBatch.from_padded(ids, full)
    if not torch.equal(batch.unpack(batch.input_ids), ids):
        raise SystemExit("what was packed does not come back; not timed")
    print(f"{args.sequences} sequences of {args.length} tokens, {torch.get_num_threads()} threads, ", end="")
    print(f"medians of {args.runs}")
    for name, function in {
        "from_padded, full": lambda: PackedBatch.from_padded(ids, full),
        "from_padded, ragged": lambda: PackedBatch.from_padded(ids, ragged),
        "pack, a value for each token": lambda: batch.pack(ids, of="token"),
        "unpack": lambda: batch.unpack(batch.input_ids),
    }.items():
        print(f"  {name:30s} {median_ms(function, args.runs):6.2f} ms")


if __name__ == "__main__":
    main()
