"""The run: check everything, load the model, score part after part, merge.

The input is read twice. The first pass parses and tokenises every record, so that a bad one is reported before the
model is loaded and not after hours of work; the second feeds the model. Neither holds more than one part's records.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from logitless.errors import InvalidInputError, LogitlessError, UnsupportedError
from logitless.mismatch import Mismatch
from logitless_hf.forward import PackedForward, make_forward
from logitless_hf.score.batches import TokenSequence, pack, plan
from logitless_hf.score.checkpoint import Checkpoint
from logitless_hf.score.encode import Encoder
from logitless_hf.score.mismatch import MismatchReport
from logitless_hf.score.options import Options, Sampling
from logitless_hf.score.ranks import Ranks, join
from logitless_hf.score.records import InputFile, parse
from logitless_hf.score.writer import ROLLOUT_COLUMNS, Output, Row, refuse_other_run, row

__all__ = ["Summary", "run"]


@dataclass(frozen=True, slots=True)
class Summary:
    """What this process did: records and completion tokens that it scored itself, parts found done not counted."""

    records: int
    tokens: int
    scored_records: int
    scored_tokens: int
    mismatch: Mismatch | None = None  # of the whole file, on the rank that merged it, if records carry logprobs


@dataclass(frozen=True, slots=True)
class _Census:
    records: int
    tokens: int  # scored tokens of this rank's share
    share: int  # records of this rank's share
    rollout: bool  # a record of any rank's share carries the engine's logprobs
    sha256: str


def run(options: Options, console: Console) -> Summary:
    """Score a file as `options` say; progress goes to `console` if it is a terminal."""
    joined = join(options.join_timeout)
    with joined as ranks, _progress(console, ranks) as progress, closing(Output(options.output)) as output:
        return _Run(options, ranks, progress, output).run()


class _Run:
    def __init__(self, options: Options, ranks: Ranks, progress: Progress, output: Output) -> None:
        self.options = options
        self.ranks = ranks
        self.progress = progress
        self.output = output

    def run(self) -> Summary:
        options, ranks, output = self.options, self.ranks, self.output
        with ranks.together():
            options.check()
            source = InputFile(options.input)
            output.refuse_existing(resume=options.resume, overwrite=options.overwrite)
            checkpoint = Checkpoint(options.model)
            encoder = Encoder(checkpoint.tokenizer, checkpoint.vocab_size, checkpoint.max_positions)
            census = self._check_records(source, encoder)
        census = replace(census, rollout=ranks.any(census.rollout))
        with ranks.together():
            rollout = self._rollout_sampling(census)
            manifest = self._manifest(checkpoint, census)
            complete = options.resume and output.is_complete()
            if complete:
                refuse_other_run((output.metadata() or {}).get("run", {}), manifest, output.path)
                output.check_whole(census.records)
                if ranks.rank == 0:
                    output.tidy()
        if complete:
            return Summary(census.records, census.tokens, 0, 0)
        with ranks.together():
            if ranks.rank == 0:
                output.begin(manifest, resume=options.resume, overwrite=options.overwrite)
            output.join(manifest)
        with ranks.together():
            if not output.folder.is_dir():
                raise InvalidInputError(
                    f"--output: rank {ranks.rank} does not see {output.folder}, which rank 0 made; "
                    "give a folder that all ranks share"
                )
            model = checkpoint.load(options.torch_dtype(), options.torch_device(ranks.local_rank))
            forward = packing_forward(model, options.backend)
        # No rank waits inside: one that fails ends at once, and torchrun ends the others.
        records, tokens = self._score(forward, source, encoder, census, rollout)
        report: MismatchReport | None = None
        with ranks.together():
            pass
        with ranks.together():
            if ranks.rank == 0:
                metadata = self._metadata(manifest, encoder, forward, census)
                double = model.dtype == torch.float64
                report = self._report(rollout)
                task = self.progress.add_task("merging records", total=census.records)
                output.merge(
                    census.records,
                    options.records_per_part,
                    metadata,
                    double=double,
                    report=report,
                    advance=lambda: self.progress.advance(task),
                )
        return Summary(census.records, census.tokens, records, tokens, None if report is None else report.mismatch)

    def _check_records(self, source: InputFile, encoder: Encoder) -> _Census:
        task = self.progress.add_task("checking records", total=None)
        share = tokens = 0
        rollout = False
        for _, sequences in self._parts(source, encoder, lambda part: False):
            share += len(sequences)
            rollout = rollout or any(sequence.rollout_log_probs is not None for sequence in sequences)
            tokens += sum(len(sequence.ids) - sequence.prompt_length for sequence in sequences)
            self.progress.update(task, completed=share)
        self.progress.remove_task(task)
        if source.records == 0:
            raise InvalidInputError(f"--input: {source.path} is empty, expected one or more lines of JSON")
        return _Census(source.records, tokens, share, rollout, source.sha256)

    def _rollout_sampling(self, census: _Census) -> Sampling | None:
        """What records' logprobs are of; None if none carries any."""
        options = self.options
        if not census.rollout:
            if options.rollout_logprobs is not None:
                raise InvalidInputError(
                    f'--rollout-logprobs: no record of {options.input} has the field "logprobs", expected one or more; '
                    "leave the option out to score alone"
                )
            return None
        found = options.rollout_sampling()
        if found is None:
            raise InvalidInputError(
                f'records carry "logprobs", and at {options.sampling()} it matters which: give --rollout-logprobs raw, '
                "if the engine took them before that, or processed, if after; or rename the field to have it ignored"
            )
        return found

    def _report(self, rollout: Sampling | None) -> MismatchReport | None:
        if rollout is None:
            return None
        about = {
            "input": str(self.options.input),
            "model": str(self.options.model),
            "rollout_logprobs": self.options.rollout_logprobs or "raw or processed, the same at temperature 1",
            **{f"{name}_compared": value for name, value in asdict(rollout).items()},
            "delta": "log_prob here - the rollout's, nats; ratio = exp(delta)",
            "kl": "KL(rollout || here) per token, nats: mean of ratio - 1 - delta",
        }
        return MismatchReport(about)

    def _parts(
        self, source: InputFile, encoder: Encoder, skip: Callable[[int], bool]
    ) -> Iterator[tuple[int, list[TokenSequence]]]:
        """This rank's parts, every size-th of all, each with its records as tokens."""
        size = self.options.records_per_part
        for part, lines in groupby(source.lines(), key=lambda line: line[0].record // size):
            if part % self.ranks.size == self.ranks.rank and not skip(part):
                yield part, [encoder(parse(raw, place), place) for place, raw in lines]

    def _score(
        self,
        forward: PackedForward,
        source: InputFile,
        encoder: Encoder,
        census: _Census,
        rollout: Sampling | None,
    ) -> tuple[int, int]:
        """Score the parts that are not there yet; how many records and tokens that was."""
        task = self.progress.add_task("scoring records", total=census.share)
        records = tokens = 0
        budget, padded = self.options.max_tokens_per_batch, forward.layout == "bshd"

        def is_done(part: int) -> bool:
            done = self.output.has_part(part)
            if done:
                size = self.options.records_per_part
                self.progress.advance(task, min(size, census.records - part * size))
            return done

        for part, sequences in self._parts(source, encoder, is_done):
            rows: list[Row] = []
            for batch in plan([len(sequence.ids) for sequence in sequences], budget, padded=padded):
                chosen = [sequences[index] for index in batch]
                rows += score_batch(forward, chosen, encoder, self.options.sampling(), rollout)
                self.progress.advance(task, len(batch))
            self.output.write_part(part, sorted(rows, key=lambda row: int(row["record"])))
            records += len(rows)
            tokens += sum(len(row["token_ids"]) for row in rows)
        if source.sha256 != census.sha256:
            raise InvalidInputError(
                f"--input: {source.path} changed while it was being scored; begin anew with --overwrite"
            )
        return records, tokens

    def _manifest(self, checkpoint: Checkpoint, census: _Census) -> dict[str, Any]:
        packages = ("logitless", "logitless-hf", "torch", "transformers", "tokenizers")
        return {
            "options": self.options.that_shape_results(),
            "input": {"sha256": census.sha256, "records": census.records},
            "model": {"sha256": checkpoint.fingerprint()},
            "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        }

    def _metadata(
        self, manifest: dict[str, Any], encoder: Encoder, forward: PackedForward, census: _Census
    ) -> dict[str, Any]:
        model: Any = forward.model
        rollout = {
            "rollout_log_probs": "the record's logprobs",
            "rollout_delta": "log-prob here, of the distribution that those are of, less those; nats",
        }
        return {
            "run": manifest,
            "input": str(self.options.input),
            "model": {
                "path": str(self.options.model),
                "class": type(model).__name__,
                "dtype": str(model.dtype).removeprefix("torch."),
            },
            "layout": forward.layout,
            "ranks": self.ranks.size,
            "tokenization": encoder.describe(),
            "columns": {
                "record": "line number in the input, from 0",
                "token_ids, tokens": "the completion's tokens; tokens are the vocabulary's own strings",
                "log_probs, entropy": "nats, of the distribution at the given temperature, top-k and top-p",
                "sum_log_prob, mean_entropy": "over the completion's tokens",
                **(rollout if census.rollout else {}),
            },
        }


def packing_forward(model: Any, backend: str | None) -> PackedForward:
    """The model over one row of many sequences, "thd", or over padded rows, "bshd", if it would mix them."""
    try:
        return make_forward(model, "thd", backend)
    except UnsupportedError:  # if that is for another reason, this says so
        return make_forward(model, "bshd", backend)


@torch.no_grad()
def score_batch(
    forward: PackedForward,
    sequences: list[TokenSequence],
    encoder: Encoder,
    sampling: Sampling,
    rollout: Sampling | None = None,
) -> list[Row]:
    """The scores of some sequences; one row for each, in their order, compared with the rollout's if that is asked."""
    model: Any = forward.model
    batch = pack(sequences, model.device)
    compared: torch.Tensor | None = None
    try:
        out = forward(batch, **asdict(sampling), entropy_grad=False)
        if rollout not in (None, sampling) and any(one.rollout_log_probs for one in sequences):
            compared = forward(batch, **asdict(rollout), entropy=False).log_probs
    except torch.OutOfMemoryError as error:
        raise UnsupportedError(
            f"a batch of {batch.input_ids.numel()} tokens does not fit in memory; lower --max-tokens-per-batch, then "
            "begin anew with --overwrite"
        ) from error
    assert out.log_probs is not None
    assert out.entropy is not None
    log_probs_T, entropy_T = out.log_probs.cpu(), out.entropy.cpu()
    compared_T = log_probs_T if compared is None else compared.cpu()
    begin = 0
    rows = []
    for sequence in sequences:
        scored = slice(begin + sequence.prompt_length - 1, begin + len(sequence.ids) - 1)
        log_probs, entropy = log_probs_T[scored], entropy_T[scored]
        mine = compared_T[scored]
        begin += len(sequence.ids)
        if not bool(torch.isfinite(log_probs).all() and torch.isfinite(entropy).all()):
            raise LogitlessError(
                f"record {sequence.record}: the model gives log-probs or entropies that are not finite; "
                "try --dtype float32 or bfloat16, and check the model's weights"
            )
        ids = sequence.ids[sequence.prompt_length :]
        double = log_probs.dtype == torch.float64
        scores = row(sequence.record, ids, encoder.tokens(ids), log_probs.tolist(), entropy.tolist(), double=double)
        if rollout is not None:
            theirs = sequence.rollout_log_probs
            deltas = None if theirs is None else [a - b for a, b in zip(mine.tolist(), theirs, strict=True)]
            scores |= dict(zip(ROLLOUT_COLUMNS, (theirs, deltas), strict=True))
        rows.append(scores)
    return rows


def _progress(console: Console, ranks: Ranks) -> Progress:
    name = f"rank {ranks.rank}: " if ranks.size > 1 else ""
    return Progress(
        TextColumn(name + "{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal or ranks.rank > 0,
    )
