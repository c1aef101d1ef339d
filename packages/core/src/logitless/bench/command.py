"""The command itself: options, the order of things, and where the results go."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console

from logitless._registry import BACKENDS, choose_backend, statuses
from logitless.bench.candidates import WAYS, Candidate, ours, products
from logitless.bench.gate import Gate, WrongResultError
from logitless.bench.inputs import Inputs, Shape, chosen_shapes
from logitless.bench.peers import Peer, chosen_peers, peer_candidates, why_not
from logitless.bench.progress import Step, progress_bar
from logitless.bench.record import Row, ShapeResult, check_files, draw, machine, show
from logitless.bench.timing import measure, peak_gib
from logitless.doctor import call_request
from logitless.errors import InvalidInputError, LogitlessError
from logitless.types import Request

__all__ = ["bench"]

MAIN = ("forward", "recompute", "kept", "kept-log-probs", "single-pass")
SECOND = ("forward", "recompute")
MODES = ("forward", "backward")
FILE_WIDTH = 160  # of the tables where nobody's terminal says


def _some_of(option: str, value: str, allowed: tuple[str, ...]) -> list[str]:
    wanted = [name.strip() for name in value.split(",")]
    for name in wanted:
        if name not in allowed:
            raise InvalidInputError(f"{option}: got {name!r}, expected some of {', '.join(allowed)}")
    return list(dict.fromkeys(wanted))


def _backends(names: str | None, request: Request) -> tuple[list[str], dict[str, str]]:
    """Backends to time, the named ones or all that can serve, best first; of the others the reason.

    Raises:
        NotFoundError, UnsupportedError: a named backend, or every one, cannot serve.
    """
    if names is not None:
        wanted = [name.strip() for name in names.split(",")]
        return [choose_backend(request, name).name for name in dict.fromkeys(wanted)], {}
    serving, refused = [], {}
    for status in statuses(BACKENDS):
        try:
            serving.append(choose_backend(request, status.name))
        except LogitlessError as error:
            refused[f"backend {status.name}"] = str(error)
    if not serving:
        choose_backend(request, None)
    return [backend.name for backend in sorted(serving, key=lambda backend: -backend.priority)], refused


T = TypeVar("T")


def _attempt(candidate: Candidate, action: Callable[[], T], result: ShapeResult, inputs: Inputs) -> T | None:
    """What the action returns; None, with the reason in the result, where the candidate cannot run here."""
    found = None
    try:
        found = action()
    except WrongResultError:
        raise
    except Exception as error:  # of another library, or out of memory
        label = candidate.name if candidate.kind == "ours" else f"{candidate.name}, {candidate.mode}"
        result.not_run[label] = why_not(error)
        foreseen = isinstance(error, (LogitlessError, torch.OutOfMemoryError))
        result.failed |= candidate.kind == "ours" and not foreseen
    inputs.hidden.grad = inputs.weight.grad = None
    if found is None and inputs.hidden.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _admit(
    candidates: list[Candidate], result: ShapeResult, inputs: Inputs, step: Step
) -> list[tuple[Candidate, dict[str, float], float | None]]:
    """Candidates that run and pass the gate, with errors and peaks; the reasons of others go to the result."""
    gate = Gate(inputs)
    passed = []
    for i, candidate in enumerate(candidates):
        step("gate", i, len(candidates))
        errors = _attempt(candidate, partial(gate.check, candidate), result, inputs)
        if errors is not None:
            passed.append((candidate, errors))
    del gate  # the truth takes room that a candidate may need
    admitted: list[tuple[Candidate, dict[str, float], float | None]] = []
    device = inputs.hidden.device
    for i, (candidate, errors) in enumerate(passed):
        step("memory", i, len(passed))
        if not candidate.traceable and device.type != "cuda":
            admitted.append((candidate, errors, None))
            continue
        peak = _attempt(candidate, partial(peak_gib, candidate.run, device), result, inputs)
        if peak is not None:
            admitted.append((candidate, errors, peak))
    return admitted


def run_shape(
    shape: Shape,
    request: Request,
    *,
    backends: list[str],
    peers: dict[str, Peer],
    ways: list[str],
    modes: list[str],
    rounds: int,
    seconds: float,
) -> ShapeResult:
    """Gate and time everything at one size."""
    inputs = Inputs(shape, request.hidden_dtype, request.device)
    result = ShapeResult(shape)
    candidates = products(inputs)
    for i, backend in enumerate(backends):
        candidates += ours(inputs, backend, ways if i == 0 else [way for way in ways if way in SECOND])
    others, result.not_run = peer_candidates(inputs, peers)
    candidates = [candidate for candidate in candidates + others if candidate.mode in modes]
    with progress_bar(shape.name) as step:
        admitted = _admit(candidates, result, inputs, step)
        times = measure([candidate for candidate, *_ in admitted], request.device, rounds, seconds, step)
    result.rows = [Row(*entry, measured) for entry, measured in zip(admitted, times, strict=True)]
    return result


def bench(
    shapes: Annotated[str | None, typer.Option(help="Named sizes: s1 … s5, l, n256, n1024, n2048, small.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Number of tokens of a size of your own.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Its hidden size.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Its vocab rows.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 on a GPU and float32 on a CPU, if not given.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda where there is one, else cpu.")] = None,
    mode: Annotated[
        str, typer.Option(help="forward, backward (which is both), or forward,backward.")
    ] = "forward,backward",
    ways: Annotated[str, typer.Option(help=f"all, or some of {', '.join(WAYS)}.")] = ",".join(MAIN),
    backends: Annotated[
        str | None, typer.Option(help="The first in all ways; all that can serve, if not given.")
    ] = None,
    peers: Annotated[str, typer.Option(help="all, none, or some of eager, compiled, trl, liger, verl, …")] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Each figure is the median of so many runs.")] = 11,
    seconds: Annotated[float, typer.Option(help="Time limit of each size's rounds; three are always run.")] = 60.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write the results.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Where to draw them (.png, .svg, .pdf); needs matplotlib.")] = None,
) -> None:
    """Time the op against the logits in full, other libraries and the matrix products alone, on this machine."""
    check_files(json_path, plot)
    gpu = device.startswith("cuda") if device is not None else torch.cuda.is_available()
    dtype = dtype or ("bfloat16" if gpu else "float32")
    request = call_request(device, dtype)
    chosen = chosen_shapes(shapes, tokens, hidden, vocab, request.device)
    names, refused = _backends(backends, request)
    plan: dict[str, Any] = {
        "backends": names,
        "peers": chosen_peers(peers),
        "ways": list(WAYS) if ways == "all" else _some_of("--ways", ways, tuple(WAYS)),
        "modes": _some_of("--mode", mode, MODES),
        "rounds": rounds,
        "seconds": seconds,
    }
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    record: dict[str, Any] = {**machine(request.device), "dtype": dtype, "shapes": {}}
    console.print(f"{record['device']['name']}, {dtype}, torch {torch.__version__}\n", highlight=False)
    failed = False
    for shape in chosen:
        result = run_shape(shape, request, **plan)
        result.not_run = {**refused, **result.not_run}
        record["shapes"][shape.name] = result.as_json()
        show(shape.name, record["shapes"][shape.name], console)
        if json_path is not None:
            json_path.write_text(json.dumps(record, indent=1) + "\n")
        failed |= result.failed
        if request.device.type == "cuda":
            torch.cuda.empty_cache()
    if plot is not None:
        draw(record, plot)
    if failed:
        raise typer.Exit(1)
