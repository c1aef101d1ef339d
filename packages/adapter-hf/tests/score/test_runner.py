from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from logitless.errors import InvalidInputError, LogitlessError, UnsupportedError
from logitless_hf.score import runner
from logitless_hf.score.runner import Summary

Score = Callable[..., Summary]
Write = Callable[..., Path]
Varied = Callable[[int], list[dict[str, Any]]]


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
    assert metadata["run"]["versions"]["torch"] == version("torch")


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
