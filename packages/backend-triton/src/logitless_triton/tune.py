"""`logitless tune`: what other tile shapes would take on this GPU, beside the table's. It changes nothing.

A call never tunes itself: the forward's tile decides a score's bits, so it is the same wherever the table is. What is
found here is put into `logitless_triton.config` by hand, for everybody.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import logitless
from logitless.bench.candidates import Candidate, Outcome, forward_and_backward
from logitless.bench.inputs import Inputs, Shape
from logitless.bench.progress import progress_bar
from logitless.bench.timing import measure
from logitless.doctor import call_request
from logitless.errors import InvalidInputError, UnsupportedError
from logitless.types import Request
from logitless_triton.backend import TritonBackend
from logitless_triton.config import Config, Tile, config_for, device_facts, trying

__all__ = ["candidates", "tune"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def candidates(tile: Tile) -> list[Tile]:
    """The tile and what is near it, each once: sizes, stages, and programs on a multiprocessor."""
    found = [tile]
    for rows, columns, warps, per_sm in ((128, 128, 4, 2), (128, 128, 8, 1), (128, 256, 8, 1), (64, 128, 4, 2)):
        for depth, stages in ((64, 3), (64, 4), (32, 4)):
            found.append(Tile(rows, columns, depth, warps, stages, per_sm))
    found += [replace(tile, group=group) for group in (4, 16)]
    return list(dict.fromkeys(found))


def _run(inputs: Inputs, config: Config, backward: bool) -> Outcome:
    def scorer(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = logitless.linear_log_probs(hidden, weight, labels, backend="triton")
        assert out.entropy is not None
        return out.log_probs, out.entropy

    with trying(config):
        return forward_and_backward(inputs, "backward" if backward else "forward", scorer)


def _usable(inputs: Inputs, config: Config, expected: Outcome, backward: bool) -> str | None:
    """None, or why a tile cannot be had on this device."""
    try:
        got = _run(inputs, config, backward)
        worst = float((got.log_probs - expected.log_probs).abs().max())
    except Exception as error:  # what a compiler says of a tile that does not fit has many types
        return f"{type(error).__name__}: {error}".splitlines()[0][:80]
    return None if worst <= 1e-3 else f"log_probs are off by {worst:.2g} nats"


def tune(
    tokens: Annotated[int, typer.Option(help="Tokens of a call.")] = 8192,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 4096,
    vocab: Annotated[int, typer.Option(help="Vocab rows.")] = 151936,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="The device.")] = "cuda",
    rounds: Annotated[int, typer.Option(help="Rounds; the figures are medians.")] = 9,
    seconds: Annotated[float, typer.Option(help="Start no round after so long.")] = 60.0,
) -> None:
    """Time other tile shapes of the Triton backend beside the table's, but for held logits; changes nothing."""
    if dtype not in DTYPES:
        raise InvalidInputError(f"--dtype: got {dtype!r}, expected one of {', '.join(DTYPES)}")
    for name, value in (("tokens", tokens), ("hidden", hidden), ("vocab", vocab), ("rounds", rounds)):
        if value < 1:
            raise InvalidInputError(f"--{name}: got {value}, expected a positive number")
    where, kind = call_request(device, dtype).device, DTYPES[dtype]
    request = Request(where, kind, kind, n_tokens=tokens, hidden_size=hidden, vocab_rows=vocab)
    backend, console = TritonBackend(), Console()
    reason = backend.supports(request)
    if reason is not None:
        raise UnsupportedError(f"nothing to tune: {reason}")
    console.print(backend.explain(request), highlight=False)
    inputs = Inputs(Shape("tune", tokens, hidden, vocab), kind, where)
    table = config_for(device_facts(where), kind, hidden)
    for part, backward in (("forward", False), ("dz", True)):
        _report(console, part, inputs, table, backward, rounds, seconds)


def _report(
    console: Console, part: str, inputs: Inputs, table: Config, backward: bool, rounds: int, seconds: float
) -> None:
    """Measure and print one kernel's tiles; `dz` is timed within a forward and backward that keeps nothing."""
    own = getattr(table, part)
    near = candidates(own)
    tiles, runs, refused = [], [], {}
    with progress_bar(part) as step:
        expected = _run(inputs, table, backward)
        for i, tile in enumerate(near):
            step("compile and check", i, len(near))
            config = replace(table, **{part: tile})
            reason = _usable(inputs, config, expected, backward)
            if reason is not None:
                refused[tile] = reason
                continue
            tiles.append(tile)
            run = partial(_run, inputs, config, backward)
            runs.append(Candidate(str(tile), "ours", "backward" if backward else "forward", "2NDV", run))
        times = [found.median_ms for found in measure(runs, inputs.hidden.device, rounds, seconds, step)]
    mine = times[tiles.index(own)]
    lines = Table(title=f"{part}: the table's tile takes {mine:.3f} ms" + " (forward and backward)" * backward)
    for heading in ("tile", "warps", "stages", "per SM", "group", "ms", "of the table's"):
        lines.add_column(heading, justify="right")
    for time, tile in sorted(zip(times, tiles, strict=True), key=lambda pair: pair[0]):
        shape = f"{tile.rows}×{tile.columns}×{tile.depth}"
        settings = (str(x) for x in (tile.warps, tile.stages, tile.per_sm, tile.group))
        lines.add_row(shape, *settings, f"{time:.3f}", "the table's" if tile == own else f"{time / mine:.3f}")
    console.print(lines)
    for tile, reason in refused.items():
        console.print(f"not run: {tile}: {reason}", highlight=False)
