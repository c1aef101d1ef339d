"""Time and memory: all candidates once a round in random order, so that a machine that slows down is slow to all.

On a GPU matrix products run before each, as layers do before a head in training: launches overlap with them, and the
card is at the clock that its power limit allows. Else what ran before decides: on an H200 the products of shape s4
took 44 ms after others, and 38 after a pause.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

from logitless.bench.candidates import Candidate
from logitless.bench.progress import Step
from logitless.testing.memory import MemoryTracker

__all__ = ["Measured", "clock", "measure", "peak_gib"]

LOAD_MS, LOAD_SIZE = 100.0, 8192  # on an H200 the clock no longer changes after some 60 ms
LEAST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds of one candidate: median and quartiles of wall (CPU) or device (GPU) time.

    `processor_ms`, the median processor time of all threads, is for a CPU whose cores others use; None on a GPU.
    """

    rounds: int
    median_ms: float
    quartiles_ms: tuple[float, float]
    processor_ms: float | None


def peak_gib(run: Callable[[], object], device: torch.device) -> float:
    """GiB beyond what was there before, outputs and gradients included."""
    if device.type != "cuda":
        with MemoryTracker() as tracker:
            run()
        return float(tracker.peak_bytes / 2**30)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return float((torch.cuda.max_memory_allocated(device) - before) / 2**30)


def _elapsed(run: Callable[[], object], before: Callable[[], object]) -> float:
    """Milliseconds on the current device, by events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before()
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


@cache
def _load(device: torch.device) -> Callable[[], None]:
    """Queues matrix products of about `LOAD_MS`."""
    a, b, out = (torch.randn(LOAD_SIZE, LOAD_SIZE, device=device, dtype=torch.bfloat16) for _ in range(3))

    def multiply(times: int = 1) -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    each = min(_elapsed(multiply, multiply) for _ in range(5))
    return partial(multiply, max(1, round(LOAD_MS / each)))


def _gpu_time(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    with torch.cuda.device(device):
        return _elapsed(run, _load(device)), 0.0


def _cpu_time(run: Callable[[], object]) -> tuple[float, float]:
    wall, busy = time.perf_counter(), time.process_time()
    run()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - busy)


def clock(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Milliseconds of one run: on the device (on a CPU, of wall time), and on a CPU of processor time, else 0."""
    return _gpu_time(run, device) if device.type == "cuda" else _cpu_time(run)


def measure(
    candidates: list[Candidate], device: torch.device, rounds: int, seconds: float, step: Step | None = None
) -> list[Measured]:
    """Times of each, in as many rounds as the seconds allow, but three at least; `step` is told of every round."""
    found: list[list[tuple[float, float]]] = [[] for _ in candidates]
    order = list(range(len(candidates)))
    shuffle, begin = random.Random(0), time.perf_counter()
    for done in range(rounds):
        if done >= LEAST_ROUNDS and time.perf_counter() - begin > seconds:
            break
        if step is not None:
            step("rounds", done, rounds)
        shuffle.shuffle(order)
        for i in order:
            found[i].append(clock(candidates[i].run, device))
    return [_summary(times, device) for times in found]


def _summary(times: list[tuple[float, float]], device: torch.device) -> Measured:
    wall = [taken for taken, _ in times]
    low, _, high = statistics.quantiles(wall, n=4, method="inclusive") if len(wall) > 1 else (wall[0],) * 3
    busy = None if device.type == "cuda" else statistics.median(busy for _, busy in times)
    return Measured(len(wall), statistics.median(wall), (low, high), busy)
