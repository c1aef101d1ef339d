from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from logitless.errors import InvalidInputError
from logitless_hf.score import writer
from logitless_hf.score.writer import Output, Row, row

MANIFEST: dict[str, Any] = {"options": {"temperature": 1.0, "dtype": None}, "input": {"sha256": "aa"}}


def some_row(record: int, tokens: int = 2) -> Row:
    scores = [-0.1 * (record + 1)] * tokens
    return row(record, [7] * tokens, ["a"] * (tokens - 1) + [None], scores, scores, double=False)


@pytest.fixture(params=["scores.jsonl", "scores.parquet"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> Output:
    return Output(tmp_path / request.param)


def rows_of(output: Output) -> list[Row]:
    if output.path.suffix == ".parquet":
        rows: list[Row] = pq.read_table(output.path).to_pylist()
        return rows
    return [json.loads(line) for line in output.path.read_text().splitlines()]


def test_nine_digits_carry_float32_and_all_of_them_float64() -> None:
    values = -torch.rand(1000, generator=torch.Generator().manual_seed(0)).log().neg() * 30
    single = row(0, [0], ["a"], values.tolist(), values.tolist(), double=False)
    assert torch.equal(torch.tensor(json.loads(json.dumps(single))["log_probs"]), values)
    assert len(json.dumps(single["log_probs"])) < 0.7 * len(json.dumps(values.tolist()))
    doubles = values.double() / 3
    double = row(0, [0], ["a"], doubles.tolist(), doubles.tolist(), double=True)
    assert torch.equal(torch.tensor(json.loads(json.dumps(double))["log_probs"], dtype=torch.float64), doubles)


def test_sums_are_of_what_is_written() -> None:
    scored = row(3, [1, 2], ["a", "b"], [-1 / 3, -0.25], [0.5, 1.0], double=False)
    assert scored["sum_log_prob"] == scored["log_probs"][0] + scored["log_probs"][1]
    assert scored["mean_entropy"] == 0.75


def test_parts_are_merged_in_order_and_put_away(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_MERGE_TOKENS", 5)  # several row groups
    output.begin(MANIFEST, overwrite=False)
    for part in (2, 0, 1):
        output.write_part(part, [some_row(2 * part), some_row(2 * part + 1)])
    output.merge(3, {"run": MANIFEST}, double=False)
    assert [found["record"] for found in rows_of(output)] == list(range(6))
    assert rows_of(output)[4]["log_probs"] == pytest.approx([-0.5, -0.5])
    assert rows_of(output)[4]["tokens"] == ["a", None]
    assert output.metadata() == {"run": MANIFEST}
    kept = {output.path, output.meta_path} if output.path.suffix == ".jsonl" else {output.path}
    assert set(output.path.parent.iterdir()) == kept
    if output.path.suffix == ".parquet":
        assert pq.ParquetFile(output.path).num_row_groups == 2


def test_a_part_is_whole_or_not_there(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    output.begin(MANIFEST, overwrite=False)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            output.write_part(0, [some_row(0)])
    assert not output.has_part(0)
    output.begin(MANIFEST, overwrite=False)
    output.write_part(0, [some_row(0)])
    assert output.has_part(0)
    output.merge(1, {}, double=False)
    assert not list(output.path.parent.glob("*.parts"))  # what the interruption left is gone too


@pytest.mark.parametrize("at", ["before the output is in place", "before the parts are away"])
def test_an_interrupted_merge_is_done_again(output: Output, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output.begin(MANIFEST, overwrite=False)
    output.write_part(0, [some_row(0)])
    name = "replace" if at.startswith("before the output") else "unlink"
    with monkeypatch.context() as patch:
        patch.setattr(Path, name, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            output.merge(1, {}, double=False)
    assert output.path.exists() == (name == "unlink")
    assert not output.is_complete()
    again = Output(output.path)
    again.begin(MANIFEST, overwrite=False)
    assert again.has_part(0)
    again.merge(1, {}, double=False)
    assert again.is_complete()
    assert len(rows_of(again)) == 1


def test_a_run_of_another_kind_is_not_gone_on_with(output: Output) -> None:
    output.begin(MANIFEST, overwrite=False)
    output.write_part(0, [some_row(0)])
    other = {"options": {"temperature": 0.5, "dtype": None}, "input": {"sha256": "bb"}}
    message = 'input.sha256 was "aa" and is now "bb"; options.temperature was 1.0 and is now 0.5'
    with pytest.raises(InvalidInputError, match=message):
        output.begin(other, overwrite=False)
    output.begin(other, overwrite=True)
    assert not output.has_part(0)
    output.begin(MANIFEST, overwrite=False)  # a run that failed before its first part stands in nobody's way


def test_what_is_there_is_not_touched_unasked(output: Output) -> None:
    output.refuse_existing(resume=False, overwrite=False)
    output.path.write_text("precious")
    with pytest.raises(InvalidInputError, match=r"exists; give --overwrite to replace it"):
        output.refuse_existing(resume=False, overwrite=False)
    output.refuse_existing(resume=True, overwrite=False)
    output.refuse_existing(resume=False, overwrite=True)
    output.begin(MANIFEST, overwrite=True)
    assert output.path.read_text() == "precious"  # until there is something to replace it with
    output.path.unlink()
    output.refuse_existing(resume=False, overwrite=False)
    output.write_part(0, [some_row(0)])
    with pytest.raises(InvalidInputError, match=r"unfinished run; give --resume .*--overwrite"):
        output.refuse_existing(resume=False, overwrite=False)


def test_foreign_files_among_the_parts_are_left_alone(output: Output) -> None:
    output.begin(MANIFEST, overwrite=False)
    (output.folder / "notes.txt").write_text("precious")
    with pytest.raises(InvalidInputError, match="not of this tool and were left alone"):
        output.begin(MANIFEST, overwrite=True)
    assert (output.folder / "notes.txt").exists()


def test_parts_without_a_manifest_and_a_broken_one_are_refused(output: Output) -> None:
    output.begin(MANIFEST, overwrite=False)
    output.write_part(0, [some_row(0)])
    manifest = output.folder / "manifest.json"
    manifest.write_text("{")
    with pytest.raises(InvalidInputError, match="manifest.json cannot be read"):
        output.begin(MANIFEST, overwrite=False)
    manifest.unlink()
    with pytest.raises(InvalidInputError, match="parts but no manifest.json"):
        output.begin(MANIFEST, overwrite=False)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="cannot be written to .*choose another folder"):
        Output(tmp_path / "file" / "scores.jsonl").begin(MANIFEST, overwrite=False)


def test_a_file_of_others_has_no_metadata(output: Output) -> None:
    assert output.metadata() is None
    output.path.write_text("something else")
    assert output.metadata() is None
