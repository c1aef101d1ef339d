"""The command line of `logitless score`; light to import, since core's CLI imports every command to list it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["score"]


def score(
    model: Annotated[
        Path, typer.Option(help="Folder of a causal model and, for text, its tokenizer; no hub is contacted.")
    ],
    input: Annotated[Path, typer.Option(help="JSONL file: prompt and completion, messages, or input_ids.")],
    output: Annotated[Path, typer.Option(help="File to write: a name that ends in .parquet or .jsonl.")],
    temperature: Annotated[float, typer.Option(help="Divides the logits.")] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(help="Score over the K likeliest tokens, as a sampler kept them.", show_default="all")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Score over the likeliest tokens of this mass, after --top-k.", show_default="all"),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Name of a backend.", envvar="LOGITLESS_BACKEND", show_default="automatic")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float16, float32 or float64.", show_default="the checkpoint's"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda or cuda:N.", show_default="this rank's GPU if there is one"),
    ] = None,
    rollout_logprobs: Annotated[
        str | None,
        typer.Option(
            help="What the records' logprobs are: raw (before temperature, top-k and top-p) or processed (after them). "
            "Needed only where there is any of these.",
            show_default=False,
        ),
    ] = None,
    max_tokens_per_batch: Annotated[
        int, typer.Option(help="Tokens to a batch, packed in one row; a longer record goes alone.")
    ] = 8192,
    records_per_part: Annotated[
        int, typer.Option(help="Records read, sorted by length and saved together: what an interruption can cost.")
    ] = 128,
    join_timeout: Annotated[
        int, typer.Option(help="Seconds that a rank waits for the others to join it.", min=1)
    ] = 1800,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run, or begin one.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output or a run that is there.")] = False,
) -> None:
    """Log-prob and entropy of every completion token in a file of records.

    Records that carry the rollout engine's own logprobs are compared with it: OUTPUT.mismatch.json and .png.

    Start it as `torchrun --nproc-per-node N -m logitless score ...` to share the records over N processes.
    """
    from rich.console import Console
    from transformers.utils import logging

    from logitless.mismatch import RATIO_INTERVAL
    from logitless_hf.mismatch import can_plot
    from logitless_hf.score.options import Options
    from logitless_hf.score.runner import run

    console = Console(stderr=True)
    if not console.is_terminal:
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    options = Options(
        model=model,
        input=input,
        output=output,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        backend=backend,
        dtype=dtype,
        device=device,
        rollout_logprobs=rollout_logprobs,
        max_tokens_per_batch=max_tokens_per_batch,
        records_per_part=records_per_part,
        join_timeout=join_timeout,
        resume=resume,
        overwrite=overwrite,
    )
    summary = run(options, console)
    earlier = summary.records - summary.scored_records
    console.print(
        f"{output}: {summary.records} records"
        + (f", {earlier} of them scored earlier or by other ranks" if earlier else f", {summary.tokens} tokens scored"),
        highlight=False,
        soft_wrap=True,
    )
    found = summary.mismatch
    if found is not None:
        low, high = RATIO_INTERVAL
        console.print(
            f"{output}.mismatch.json: against the rollout's logprobs of {found.tokens} tokens, mean |Δ| "
            f"{found.mean_abs_delta:.2e}, max |Δ| {found.max_abs_delta:.2e}, KL {found.kl:.2e} nats, "
            f"{found.share_outside:.2%} of ratios outside [{low}, {high}]"
            + ("" if can_plot() else "; no plot without matplotlib: pip install 'logitless-hf[plot]'"),
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
