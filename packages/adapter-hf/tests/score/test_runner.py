from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from logitless.errors import InvalidInputError, LogitlessError, UnsupportedError
from logitless_hf.score import runner
from logitless_hf.score.claim import hold
from logitless_hf.score.options import Options
from logitless_hf.score.runner import Summary

Score = Callable[..., Summary]
Write = Callable[..., Path]
Varied = Callable[[int], list[dict[str, Any]]]


@pytest.fixture
def score(checkpoint: Path, tmp_path: Path) -> Score:
    """Run with the tiny model and small parts."""

    def score(records: Path, output: str = "scores.jsonl", **changes: Any) -> Summary:
        options = {"model": checkpoint, "device": "cpu", "max_tokens_per_batch": 40, "records_per_part": 4, **changes}
        return runner.run(Options(input=records, output=tmp_path / output, **options), Console(quiet=True))

    return score


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def plain_scores(folder: Path, ids: list[int], start: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """From the logits of the sequence alone, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        log_p = (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
    labels = torch.tensor(ids[start:])
    log_p = log_p[start - 1 : -1]
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_equal_the_models_own_logits(
    score: Score,
    write: Write,
    varied: Varied,
    checkpoint: Path,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    temperature: float,
) -> None:
    records = varied(11)
    summary = score(write(*records), temperature=temperature)
    rows = read(tmp_path / "scores.jsonl")
    assert [row["record"] for row in rows] == list(range(11))
    assert summary == Summary(11, sum(len(row["token_ids"]) for row in rows), 11, summary.tokens)
    for record, row in zip(records, rows, strict=True):
        if "prompt" in record:
            prompt = tokenizer(record["prompt"])["input_ids"]
            completion = tokenizer(record["completion"], add_special_tokens=False)["input_ids"]
        elif "messages" in record:
            chat = record["messages"]
            text = tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            completion = tokenizer(chat[-1]["content"] + "</s>", add_special_tokens=False)["input_ids"]
        else:
            border = record["prompt_length"]
            prompt, completion = record["input_ids"][:border], record["input_ids"][border:]
        log_probs, entropy = plain_scores(checkpoint, prompt + completion, len(prompt), temperature)
        assert row["token_ids"] == completion
        assert row["tokens"] == tokenizer.convert_ids_to_tokens(completion)
        torch.testing.assert_close(torch.tensor(row["log_probs"]).double(), log_probs, rtol=0, atol=2e-4)
        torch.testing.assert_close(torch.tensor(row["entropy"]).double(), entropy, rtol=0, atol=2e-4)
        assert row["sum_log_prob"] == pytest.approx(sum(row["log_probs"]))
        assert row["mean_entropy"] == pytest.approx(sum(row["entropy"]) / len(completion))


def test_parquet_and_jsonl_hold_the_same(score: Score, write: Write, varied: Varied, tmp_path: Path) -> None:
    records = write(*varied(7))
    score(records, "a.jsonl")
    score(records, "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.schema.field("log_probs").type == pa.list_(pa.float32())
    for got, expected in zip(table.to_pylist(), read(tmp_path / "a.jsonl"), strict=True):
        for name in ("log_probs", "entropy"):
            assert torch.equal(torch.tensor(got.pop(name)), torch.tensor(expected.pop(name)))
        assert got == expected
    metadata = json.loads(table.schema.metadata[b"logitless_score"])
    beside = json.loads((tmp_path / "a.jsonl.meta.json").read_text())
    assert metadata["run"]["options"].pop("format") == ".parquet"
    assert beside["run"]["options"].pop("format") == ".jsonl"
    assert {**metadata, "sha256": hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()} == beside


def test_metadata_say_how_text_became_tokens(score: Score, write: Write, varied: Varied, tmp_path: Path) -> None:
    score(write(*varied(3)), temperature=0.5)
    metadata = json.loads((tmp_path / "scores.jsonl.meta.json").read_text())
    assert metadata["tokenization"]["bos"]["token_ids"] == [0]
    assert len(metadata["tokenization"]["chat_template_sha256"]) == 64
    assert metadata["run"]["options"]["temperature"] == 0.5
    assert metadata["model"]["dtype"] == "float32"
    assert metadata["layout"] == "thd"
    assert metadata["run"]["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("name", ["scores.jsonl", "scores.parquet"])
def test_token_ids_are_scored_without_a_tokenizer(
    score: Score, write: Write, checkpoint: Path, tmp_path: Path, name: str
) -> None:
    records = write({"input_ids": [5, 6, 7, 8], "prompt_length": 2}, {"input_ids": [9, 5, 6], "prompt_length": 1})
    bare = shutil.copytree(checkpoint, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*", "*.jinja"))
    for output, folder in (("with." + name, checkpoint), (name, bare)):
        score(records, output, model=folder)
    table = (tmp_path / name, tmp_path / ("with." + name))
    rows, expected = (pq.read_table(p).to_pylist() if p.suffix == ".parquet" else read(p) for p in table)
    assert [row.pop("tokens") for row in rows] == [[None, None], [None, None]]
    assert all(token for row in expected for token in row.pop("tokens"))
    assert rows == expected
    with pytest.raises(InvalidInputError, match=r"line 2 \(record 1\): got text, but the model's folder has no tokeni"):
        score(
            write({"input_ids": [5, 6], "prompt_length": 1}, {"prompt": "a", "completion": "b"}), "2.jsonl", model=bare
        )


def test_a_model_that_mixes_packed_sequences_runs_padded_rows(
    score: Score, write: Write, varied: Varied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = write(*varied(7))
    score(records, "packed.jsonl")
    make_forward, rows = runner.make_forward, 0

    def refusing(model: Any, layout: str, backend: str | None) -> Any:
        if layout == "thd":
            raise UnsupportedError("packed sequences would be mixed")
        model.register_forward_pre_hook(count, with_kwargs=True)
        return make_forward(model, layout, backend)

    def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal rows
        rows = max(rows, len(kwargs["input_ids"]))
        assert kwargs["input_ids"].numel() <= 40

    monkeypatch.setattr(runner, "make_forward", refusing)
    score(records, "rows.jsonl")
    assert rows > 1
    assert json.loads((tmp_path / "rows.jsonl.meta.json").read_text())["layout"] == "bshd"
    for got, expected in zip(read(tmp_path / "rows.jsonl"), read(tmp_path / "packed.jsonl"), strict=True):
        assert got["token_ids"] == expected["token_ids"]
        assert got["log_probs"] == pytest.approx(expected["log_probs"], abs=1e-4)
        assert got["entropy"] == pytest.approx(expected["entropy"], abs=1e-4)


def test_float64_is_kept_whole(score: Score, write: Write, checkpoint: Path, tmp_path: Path) -> None:
    records = write({"input_ids": [5, 6, 7, 8], "prompt_length": 1})
    for name in ("scores.parquet", "scores.jsonl"):
        score(records, name, dtype="float64")
    log_probs, _ = plain_scores(checkpoint, [5, 6, 7, 8], 1, 1.0)
    for row in (pq.read_table(tmp_path / "scores.parquet").to_pylist()[0], read(tmp_path / "scores.jsonl")[0]):
        torch.testing.assert_close(torch.tensor(row["log_probs"], dtype=torch.float64), log_probs, rtol=1e-12, atol=0)


def test_a_record_longer_than_the_budget_goes_alone(score: Score, write: Write, tmp_path: Path) -> None:
    long = {"input_ids": [3] * 90, "prompt_length": 1}
    short = {"input_ids": [3] * 5, "prompt_length": 1}
    score(write(short, long, short))
    assert [len(row["log_probs"]) for row in read(tmp_path / "scores.jsonl")] == [4, 89, 4]


def test_no_more_than_one_part_is_held(
    score: Score, write: Write, varied: Varied, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    plan = runner.plan
    monkeypatch.setattr(
        runner, "plan", lambda lengths, *rest, **by: sizes.append(len(lengths)) or plan(lengths, *rest, **by)
    )
    score(write(*varied(11)))
    assert sizes == [4, 4, 3]


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


def test_a_bad_record_is_found_before_the_model_is_loaded(
    score: Score, write: Write, varied: Varied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.Checkpoint, "load", lambda *_: pytest.fail("the model was loaded"))
    records = write(*varied(9), {"prompt": "a"})
    with pytest.raises(InvalidInputError, match=r'records.jsonl, line 10 \(record 9\): the field "completion"'):
        score(records)
    assert list(tmp_path.iterdir()) == [records]
    with pytest.raises(InvalidInputError, match=r"line 1 \(record 0\): got token id 400 at position 1, expected"):
        score(write({"input_ids": [1, 400], "prompt_length": 1}))
    with pytest.raises(InvalidInputError, match="got 97 tokens, expected at most 96"):
        score(write({"input_ids": [1] * 97, "prompt_length": 1}))
    with pytest.raises(InvalidInputError, match="records.jsonl is empty, expected one or more lines"):
        score(write())


def test_an_input_that_changes_meanwhile_is_noticed(
    score: Score, write: Write, varied: Varied, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = write(*varied(5))
    load = runner.Checkpoint.load

    def load_and_write(*arguments: Any) -> Any:
        write(*reversed(varied(5)))
        return load(*arguments)

    monkeypatch.setattr(runner.Checkpoint, "load", load_and_write)
    with pytest.raises(InvalidInputError, match="records.jsonl changed while it was being scored"):
        score(records)


def test_scores_that_are_not_finite_are_an_error(
    score: Score, write: Write, varied: Varied, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = runner.Checkpoint.load

    def broken(*arguments: Any) -> Any:
        model = load(*arguments)
        torch.nn.init.constant_(model.model.embed_tokens.weight[300], torch.nan)
        return model

    monkeypatch.setattr(runner.Checkpoint, "load", broken)
    good, bad = ({"input_ids": [1, token, 3], "prompt_length": 1} for token in (2, 300))
    with pytest.raises(LogitlessError, match="record 1: the model gives log-probs .* not finite; try --dtype"):
        score(write(good, bad))


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
