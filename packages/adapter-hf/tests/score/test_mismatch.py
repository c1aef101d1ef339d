"""Records that carry the rollout engine's log-probs: worked values, both meanings, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from logitless.errors import InvalidInputError
from logitless.reference import scores_of
from logitless_hf.score import mismatch as module
from logitless_hf.score import runner
from logitless_hf.score.mismatch import MismatchReport
from logitless_hf.score.options import Options
from logitless_hf.score.runner import Summary

Score = Callable[..., Summary]
Write = Callable[..., Path]
OFF = [0.0, 0.2, -0.15, 0.09, 0.0]  # what the engine is off by: ratios 1, 0.819, 1.162, 0.914, 1
IDS = [[5, 6, 7, 8], [9, 3, 4, 4, 2], [7, 7]]


@pytest.fixture
def score(checkpoint: Path, tmp_path: Path) -> Score:
    def score(records: Path, output: str = "scores.jsonl", **changes: Any) -> Summary:
        options = {"model": checkpoint, "device": "cpu", "dtype": "float64", "records_per_part": 2, **changes}
        return runner.run(Options(input=records, output=tmp_path / output, **options), Console(quiet=True))

    return score


@pytest.fixture
def engine(checkpoint: Path) -> Callable[..., list[dict[str, Any]]]:
    """Records with an engine's log-probs at a temperature, `OFF` the model's own: 2, 3 and 0 tokens of them."""

    def records(temperature: float, **kept: Any) -> list[dict[str, Any]]:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
        found: list[dict[str, Any]] = []
        off = iter(OFF)
        for ids in IDS[:2]:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0] / temperature
            log_p = scores_of(logits[:-1], torch.tensor(ids[1:]), **kept).log_probs
            logprobs = [float(log_p[t - 1]) + next(off) for t in range(2, len(ids))]
            found.append({"input_ids": ids, "prompt_length": 2, "logprobs": logprobs})
        return [*found, {"input_ids": IDS[2], "prompt_length": 1}]

    return records


def check(report: dict[str, Any]) -> None:
    k3 = [math.exp(-off) - 1 + off for off in OFF]
    assert report["tokens"] == 5
    assert (report["records"], report["records_without_logprobs"]) == (2, 1)
    assert report["mean_abs_delta"] == pytest.approx(0.088, abs=1e-6)
    assert report["max_abs_delta"] == pytest.approx(0.2, abs=1e-6)
    assert report["kl"] == pytest.approx(sum(k3) / 5, abs=1e-6)
    assert report["share_outside"] == pytest.approx(0.4)
    assert report["ratio_interval"] == [0.9, 1.1]
    worst = report["worst_token"]
    assert (worst["record"], worst["position"], worst["token_id"]) == (0, 1, 8)
    assert worst["delta"] == pytest.approx(-0.2, abs=1e-6)


@pytest.mark.parametrize(
    ("temperature", "meaning", "engine_temperature"),
    [(1.0, None, 1.0), (0.5, "raw", 1.0), (0.5, "processed", 0.5), (1.0, "processed", 1.0)],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_worked_values(
    score: Score,
    write: Write,
    engine: Any,
    tmp_path: Path,
    temperature: float,
    meaning: str | None,
    engine_temperature: float,
    suffix: str,
) -> None:
    records = engine(engine_temperature)
    summary = score(write(*records), "scores" + suffix, temperature=temperature, rollout_logprobs=meaning)
    report = json.loads((tmp_path / f"scores{suffix}.mismatch.json").read_text())
    check(report)
    assert report["temperature_compared"] == engine_temperature
    assert summary.mismatch is not None
    assert summary.mismatch.kl == report["kl"]
    assert (tmp_path / f"scores{suffix}.mismatch.png").read_bytes().startswith(b"\x89PNG")
    if suffix == ".parquet":
        rows = pq.read_table(tmp_path / "scores.parquet").to_pylist()
    else:
        rows = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [row["rollout_log_probs"] for row in rows] == [record.get("logprobs") for record in records]
    deltas = [delta for row in rows if row["rollout_delta"] for delta in row["rollout_delta"]]
    assert deltas == pytest.approx([-off for off in OFF], abs=1e-6)
    assert rows[2]["rollout_delta"] is None


@pytest.mark.parametrize("kept", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.6}], ids=str)
@pytest.mark.parametrize("meaning", ["raw", "processed"])
def test_rollouts_that_were_truncated(
    score: Score, write: Write, engine: Any, tmp_path: Path, kept: dict[str, Any], meaning: str
) -> None:
    truncated, raw = engine(0.5, **kept), engine(1.0)
    assert abs(truncated[0]["logprobs"][0] - engine(0.5)[0]["logprobs"][0]) > 1e-3
    records = raw if meaning == "raw" else truncated
    score(write(*records), temperature=0.5, rollout_logprobs=meaning, **kept)
    report = json.loads((tmp_path / "scores.jsonl.mismatch.json").read_text())
    check(report)
    compared = {"temperature": 0.5, "top_k": None, "top_p": None, **kept} if meaning == "processed" else {}
    for name in ("temperature", "top_k", "top_p"):
        assert report[f"{name}_compared"] == compared.get(name, 1.0 if name == "temperature" else None)
    rows = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    scored = [value for row in rows[:2] for value in row["log_probs"]]
    assert scored == pytest.approx(
        [x - off for x, off in zip((x for one in truncated[:2] for x in one["logprobs"]), OFF, strict=True)], abs=1e-6
    )


def test_the_scores_are_those_without(score: Score, write: Write, engine: Any, tmp_path: Path) -> None:
    """The comparison adds two columns and files; a second temperature for it changes no score."""
    records = engine(1.0)
    score(write(*records), "with.jsonl", temperature=0.5, rollout_logprobs="raw")
    for record in records:
        record.pop("logprobs", None)
    assert score(write(*records), "without.jsonl", temperature=0.5).mismatch is None
    compared, plain = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("with", "without")
    )
    for row in compared:
        del row["rollout_log_probs"], row["rollout_delta"]
    assert compared == plain
    assert not list(tmp_path.glob("without.jsonl.mismatch*"))


def test_a_stale_report_is_not_left_beside_another_output(
    score: Score, write: Write, engine: Any, tmp_path: Path
) -> None:
    records = engine(1.0)
    score(write(*records))
    (tmp_path / "scores.jsonl").unlink()
    (tmp_path / "scores.jsonl.meta.json").unlink()
    with pytest.raises(InvalidInputError, match=r"scores.jsonl.mismatch.json exists; give --overwrite"):
        score(write(records[2]))
    score(write(records[2]), overwrite=True)
    assert not list(tmp_path.glob("scores.jsonl.mismatch*"))


def test_a_resumed_run_reports_on_all_of_it(
    score: Score, write: Write, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = write(*engine(1.0))
    score(records, "whole.jsonl")
    score_batch = runner.score_batch

    def only_the_first_part(forward: Any, sequences: Any, *rest: Any) -> Any:
        if sequences[0].record >= 2:
            raise KeyboardInterrupt
        return score_batch(forward, sequences, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "score_batch", only_the_first_part)
        with pytest.raises(KeyboardInterrupt):
            score(records)
    score(records, resume=True)
    whole, resumed = (tmp_path / f"{name}.jsonl.mismatch.json" for name in ("whole", "scores"))
    assert resumed.read_text() == whole.read_text()


def test_without_matplotlib_there_is_no_picture(
    score: Score, write: Write, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "can_plot", lambda: False)
    score(write(*engine(1.0)))
    check(json.loads((tmp_path / "scores.jsonl.mismatch.json").read_text()))
    assert not (tmp_path / "scores.jsonl.mismatch.png").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"logprobs": [-1.0]},
            r'field "logprobs": got 1 of them, expected 2, one for each of the completion\'s tokens',
        ),
        ({"logprobs": [-1.0, 0.3]}, r'field "logprobs\[1\]": got 0.3 \(float\), expected a list of numbers in nats'),
        ({"logprobs": [-1.0, math.nan]}, r'field "logprobs\[1\]": got NaN'),
        ({"logprobs": {"content": []}}, 'field "logprobs": got .*rename the field to have it ignored'),
    ],
    ids=["count", "probability", "nan", "another form"],
)
def test_log_probs_that_cannot_be_are_refused(
    score: Score, write: Write, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        score(write({"input_ids": [5, 6, 7, 8], "prompt_length": 2, **changes}))


def test_which_log_probs_they_are_must_be_told_where_it_matters(score: Score, write: Write, engine: Any) -> None:
    for changes, said in [
        ({"temperature": 1.0, "top_k": 3}, "at --temperature 1.0 --top-k 3 it matters which: give --rollout-logprobs"),
        ({"top_k": 0}, "--top-k: got 0, expected 1 or more"),
        ({"top_p": 0.0}, "--top-p: got 0.0, expected a number above 0"),
        ({"top_p": 1.01}, "--top-p: got 1.01, expected a number above 0"),
    ]:
        with pytest.raises(InvalidInputError, match=said):
            score(write(*engine(1.0)), **changes)
    with pytest.raises(InvalidInputError, match="--temperature 0.5 it matters which: give --rollout-logprobs raw"):
        score(write(*engine(1.0)), temperature=0.5)
    with pytest.raises(InvalidInputError, match='--rollout-logprobs: no record of .* has the field "logprobs"'):
        score(write(engine(1.0)[2]), rollout_logprobs="raw")
    with pytest.raises(InvalidInputError, match="--rollout-logprobs: got 'cooked', expected raw"):
        score(write(*engine(1.0)), rollout_logprobs="cooked")


def test_two_ranks_report_what_one_reports(
    commands: Any, write: Write, engine: Any, checkpoint: Path, tmp_path: Path
) -> None:
    records = write(*engine(1.0))  # rank 1's share carries none
    arguments = ["--model", checkpoint, "--input", records, "--records-per-part", 2, "--device", "cpu"]
    for name, ranks in (("one", 0), ("two", 2)):
        ran = commands.run(*arguments, "--output", tmp_path / f"{name}.jsonl", torchrun=ranks)
        assert ran.returncode == 0, ran.stderr
        assert (
            f"{name}.jsonl.mismatch.json: against the rollout's logprobs of 5 tokens, mean |Δ| 8.80e-02" in ran.stderr
        )
        assert "40.00% of ratios outside [0.9, 1.1]" in ran.stderr
    one, two = (tmp_path / f"{name}.jsonl.mismatch.json" for name in ("one", "two"))
    assert one.read_text() == two.read_text()
    assert (tmp_path / "one.jsonl").read_text() == (tmp_path / "two.jsonl").read_text()


def test_the_picture_takes_an_even_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POINTS", 8)
    monkeypatch.setattr(module, "_FLUSH", 16)
    report = MismatchReport({})
    token = 0
    for record, count in enumerate([3, 1, 20, 7, 40, 5]):
        here = [-float(token + i) for i in range(count)]
        token += count
        row = {"record": record, "token_ids": [0] * count, "tokens": [None] * count}
        report.see({**row, "rollout_log_probs": here, "rollout_delta": [0.0] * count})
    assert report.mismatch.tokens == token == 76
    positions = [-pair[1] for pair in report._sample]
    assert positions == list(range(0, 76, report._stride))
    assert 8 < len(positions) <= 16
