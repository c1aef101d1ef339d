"""Runs that were interrupted and go on, and outputs and other runs that are there already."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from logitless.errors import InvalidInputError
from logitless_hf.score import runner
from logitless_hf.score.claim import hold
from logitless_hf.score.runner import Summary

Score = Callable[..., Summary]
Write = Callable[..., Path]
Varied = Callable[[int], list[dict[str, Any]]]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Stop(Exception):
    """Something that ends a run."""


def stop_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> list[int]:
    """Let that many batches be scored in all, then fail; the records of each are noted."""
    scored: list[int] = []
    score_batch = runner.score_batch

    def counted(model: Any, sequences: Any, *rest: Any) -> Any:
        if len(scored) >= calls:
            raise Stop
        scored.extend(sequence.record for sequence in sequences)
        return score_batch(model, sequences, *rest)

    monkeypatch.setattr(runner, "score_batch", counted)
    return scored


@pytest.mark.parametrize("name", ["scores.jsonl", "scores.parquet"])
def test_a_resumed_run_scores_only_what_is_left(
    score: Score, write: Write, varied: Varied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    records = write(*varied(12))
    score(records, "whole." + name)
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        with pytest.raises(Stop):
            score(records, name)
    with pytest.raises(InvalidInputError, match="unfinished run; give --resume"):
        score(records, name)
    with monkeypatch.context() as patch:
        scored = stop_after(patch, 1000)
        summary = score(records, name, resume=True)
    assert sorted(scored) == list(range(4, 12))
    assert (summary.records, summary.scored_records) == (12, 8)
    assert (tmp_path / name).read_bytes() == (tmp_path / ("whole." + name)).read_bytes()


def test_resuming_what_is_finished_does_nothing(
    score: Score, write: Write, varied: Varied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = write(*varied(5))
    score(records, resume=True)  # nothing to go on with: begins
    before = (tmp_path / "scores.jsonl").read_bytes()
    monkeypatch.setattr(runner.Checkpoint, "load", lambda *_: pytest.fail("the model was loaded"))
    assert score(records, resume=True).scored_records == 0
    assert (tmp_path / "scores.jsonl").read_bytes() == before
    with pytest.raises(InvalidInputError, match="temperature was 1.0 and is now 2.0"):
        score(records, resume=True, temperature=2.0)
    (tmp_path / "scores.jsonl").write_bytes(before[:-1])
    with pytest.raises(InvalidInputError, match="scores.jsonl is damaged"):
        score(records, resume=True)
    (tmp_path / "scores.jsonl.meta.json").unlink()
    with pytest.raises(InvalidInputError, match="scores.jsonl is of another run"):
        score(records, resume=True)


def test_resuming_what_is_finished_removes_what_a_death_in_the_last_steps_left(
    score: Score, write: Write, varied: Varied, tmp_path: Path
) -> None:
    records = write(*varied(5))
    score(records)
    parts = tmp_path / "scores.jsonl.parts"
    parts.mkdir()
    (parts / "lock").touch()
    with hold(parts / "lock") as another:
        assert another is not None
        score(records, resume=True)
        assert (parts / "lock").exists()
    assert score(records, resume=True).scored_records == 0
    assert not parts.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.5}, "options.temperature was 1.0 and is now 0.5"),
        ({"dtype": "float64"}, 'options.dtype was null and is now "float64"'),
        ({"backend": "torch"}, 'options.backend was null and is now "torch"'),
        ({"max_tokens_per_batch": 41}, "options.max_tokens_per_batch was 40 and is now 41"),
        ({"records_per_part": 2}, "options.records_per_part was 4 and is now 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_options_are_refused_on_resuming(
    score: Score, write: Write, varied: Varied, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    records = write(*varied(8))
    stop_after(monkeypatch, 5)
    with pytest.raises(Stop):
        score(records)
    monkeypatch.setattr(runner.Checkpoint, "load", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(InvalidInputError, match=f"{message}. Run as before, or begin anew with --overwrite"):
        score(records, resume=True, **changes)


def test_another_input_or_model_is_refused_on_resuming(
    score: Score, write: Write, varied: Varied, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = write(*varied(8))
    other = shutil.copytree(checkpoint, tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(other)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(other)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Stop):
            score(records)
    with pytest.raises(InvalidInputError, match="model.sha256 was .* and is now"):
        score(records, resume=True, model=other)
    with pytest.raises(InvalidInputError, match="input.records was 8 and is now 9; input.sha256 was"):
        score(write(*varied(9)), resume=True)
    score(write(*varied(9)), overwrite=True)
    assert len(read(tmp_path / "scores.jsonl")) == 9


def test_an_output_that_exists_is_refused_before_anything_is_loaded(
    score: Score, write: Write, varied: Varied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scores.jsonl").write_text("precious")
    with monkeypatch.context() as patch:
        patch.setattr(runner, "Checkpoint", lambda *_: pytest.fail("the model's folder was read"))
        with pytest.raises(InvalidInputError, match=r"scores.jsonl exists; give --overwrite"):
            score(write(*varied(2)))
    with pytest.raises(InvalidInputError, match="scores.jsonl is of another run"):
        score(write(*varied(2)), resume=True)
    assert (tmp_path / "scores.jsonl").read_text() == "precious"
    score(write(*varied(2)), overwrite=True)
    assert len(read(tmp_path / "scores.jsonl")) == 2


@pytest.mark.parametrize("changes", [{}, {"resume": True}, {"overwrite": True}], ids=str)
def test_a_second_run_on_one_output_is_refused(
    score: Score,
    write: Write,
    varied: Varied,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, bool],
) -> None:
    records = write(*varied(6))
    score(records, "alone.jsonl")
    load = runner.Checkpoint.load

    def load_while_another_starts(*arguments: Any) -> Any:
        monkeypatch.setattr(runner.Checkpoint, "load", load)
        with pytest.raises(InvalidInputError, match="another run is at work in .*scores.jsonl.parts; wait"):
            score(records, temperature=3.0, **changes)
        return load(*arguments)

    monkeypatch.setattr(runner.Checkpoint, "load", load_while_another_starts)
    score(records)
    assert (tmp_path / "scores.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    assert not (tmp_path / "scores.jsonl.parts").exists()


def test_an_empty_folder_of_parts_does_not_let_a_run_of_other_options_in(
    score: Score, write: Write, varied: Varied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = write(*varied(5))
    score(records)
    before = (tmp_path / "scores.jsonl").read_bytes()
    (tmp_path / "scores.jsonl.parts").mkdir()
    with pytest.raises(InvalidInputError, match="temperature was 1.0 and is now 3.0"):
        score(records, resume=True, temperature=3.0)
    with monkeypatch.context() as patch:
        stop_after(patch, 0)
        with pytest.raises(Stop):
            score(records, overwrite=True, temperature=2.0)
    with pytest.raises(InvalidInputError, match="temperature was 2.0 and is now 3.0"):
        score(records, resume=True, temperature=3.0)
    assert (tmp_path / "scores.jsonl").read_bytes() == before
    score(records, resume=True, temperature=2.0)
    assert json.loads((tmp_path / "scores.jsonl.meta.json").read_text())["run"]["options"]["temperature"] == 2.0


def test_the_input_outlives_an_output_of_nearly_its_name(
    score: Score, write: Write, varied: Varied, tmp_path: Path
) -> None:
    records = write(*varied(3), name="scores.jsonl.tmp")
    before = records.read_bytes()
    score(records)
    assert records.read_bytes() == before
    records = write(*varied(3), name="other.jsonl.meta.json")
    for changes in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(InvalidInputError, match="other.jsonl.meta.json, which would be written, is the input"):
            score(records, "other.jsonl", **changes)
    assert records.read_bytes() == before
    assert not (tmp_path / "other.jsonl").exists()


def test_an_output_that_cannot_be_placed_is_refused_at_once(
    score: Score, write: Write, varied: Varied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "Checkpoint", lambda *_: pytest.fail("the model's folder was read"))
    records = write(*varied(3))
    (tmp_path / "scores.jsonl.parts").write_text("precious")
    with pytest.raises(InvalidInputError, match="scores.jsonl.parts is a file"):
        score(records, overwrite=True)
    (tmp_path / "target.jsonl").write_text("precious")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "target.jsonl")
    with pytest.raises(InvalidInputError, match="link.jsonl is a symbolic link"):
        score(records, "link.jsonl", overwrite=True)
    assert (tmp_path / "target.jsonl").read_text() == "precious"
