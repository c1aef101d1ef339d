from __future__ import annotations

import errno
import fcntl
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from logitless.errors import InvalidInputError, LogitlessError
from logitless_hf.score import parquet
from logitless_hf.score.writer import Output, Row, row

MANIFEST: dict[str, Any] = {"options": {"temperature": 1.0, "dtype": None}, "input": {"sha256": "aa"}}


def some_row(record: int, tokens: int = 2) -> Row:
    scores = [-0.1 * (record + 1)] * tokens
    return row(record, [7] * tokens, ["a"] * (tokens - 1) + [None], scores, scores, double=False)


@pytest.fixture(params=["scores.jsonl", "scores.parquet"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> Output:
    return Output(tmp_path / request.param)


@pytest.fixture(autouse=True)
def close(output: Output) -> Iterator[None]:
    yield
    output.close()


def again(output: Output, run: dict[str, Any] = MANIFEST, *, resume: bool = True, overwrite: bool = False) -> None:
    """Begin anew or go on after a run that was killed, whose claim ended with its process."""
    output.close()
    output.begin(run, resume=resume, overwrite=overwrite)


def merge(output: Output, records: int = 1, per_part: int = 1, run: dict[str, Any] = MANIFEST) -> None:
    output.merge(records, per_part, {"run": run}, double=False)


def run_of(output: Output) -> Any:
    return (output.metadata() or {}).get("run")


def rows_of(output: Output) -> list[Row]:
    if output.path.suffix == ".parquet":
        rows: list[Row] = pq.read_table(output.path).to_pylist()
        return rows
    return [json.loads(line) for line in output.path.read_text().splitlines()]


def test_a_merge_tells_of_each_row(output: Output) -> None:
    output.begin(MANIFEST, resume=False, overwrite=False)
    for part in range(3):
        output.write_part(part, [some_row(2 * part), some_row(2 * part + 1)])
    seen: list[int] = []
    output.merge(6, 2, {"run": MANIFEST}, double=False, advance=lambda: seen.append(len(seen)))
    assert seen == list(range(6))


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
    monkeypatch.setattr(parquet, "_GROUP_TOKENS", 5)  # several row groups
    output.begin(MANIFEST, resume=False, overwrite=False)
    for part in (2, 0, 1):
        output.write_part(part, [some_row(2 * part), some_row(2 * part + 1)])
    merge(output, 6, 2)
    assert [found["record"] for found in rows_of(output)] == list(range(6))
    assert rows_of(output)[4]["log_probs"] == pytest.approx([-0.5, -0.5])
    assert rows_of(output)[4]["tokens"] == ["a", None]
    assert run_of(output) == MANIFEST
    kept = {output.path, output.meta_path} if output.path.suffix == ".jsonl" else {output.path}
    assert set(output.path.parent.iterdir()) == kept
    if output.path.suffix == ".parquet":
        assert pq.ParquetFile(output.path).num_row_groups == 2


def test_a_part_is_whole_or_not_there(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    output.begin(MANIFEST, resume=False, overwrite=False)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            output.write_part(0, [some_row(0)])
    assert not output.has_part(0)
    again(output)
    output.write_part(0, [some_row(0)])
    assert output.has_part(0)
    merge(output)
    assert not list(output.path.parent.glob("*.parts"))  # what the interruption left is gone too


@pytest.mark.parametrize("at", ["before the output is in place", "before the parts are away"])
def test_an_interrupted_merge_is_done_again(output: Output, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output.begin(MANIFEST, resume=False, overwrite=False)
    output.write_part(0, [some_row(0)])
    name = "replace" if at.startswith("before the output") else "unlink"
    with monkeypatch.context() as patch:
        patch.setattr(Path, name, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            merge(output)
    assert output.path.exists() == (name == "unlink")
    assert not output.is_complete()
    again(output)
    assert output.has_part(0)
    merge(output)
    assert output.is_complete()
    assert len(rows_of(output)) == 1


def test_a_run_of_another_kind_is_not_gone_on_with(output: Output) -> None:
    output.begin(MANIFEST, resume=False, overwrite=False)
    output.write_part(0, [some_row(0)])
    other = {"options": {"temperature": 0.5, "dtype": None}, "input": {"sha256": "bb"}}
    message = 'input.sha256 was "aa" and is now "bb"; options.temperature was 1.0 and is now 0.5'
    with pytest.raises(InvalidInputError, match=message):
        again(output, other)
    again(output, other, resume=False, overwrite=True)
    assert not output.has_part(0)
    with pytest.raises(InvalidInputError, match="temperature was 0.5 and is now 1.0"):
        again(output)
    again(output, resume=False)  # a run that failed before its first part stands in nobody's way


def test_what_is_there_is_not_touched_unasked(output: Output) -> None:
    output.refuse_existing(resume=False, overwrite=False)
    output.path.write_text("precious")
    with pytest.raises(InvalidInputError, match=r"exists; give --overwrite to replace it"):
        output.refuse_existing(resume=False, overwrite=False)
    output.refuse_existing(resume=True, overwrite=False)
    output.refuse_existing(resume=False, overwrite=True)
    output.begin(MANIFEST, resume=False, overwrite=True)
    assert output.path.read_text() == "precious"  # until there is something to replace it with
    output.path.unlink()
    output.refuse_existing(resume=False, overwrite=False)
    output.write_part(0, [some_row(0)])
    with pytest.raises(InvalidInputError, match=r"unfinished run; give --resume .*--overwrite"):
        output.refuse_existing(resume=False, overwrite=False)


def test_foreign_files_among_the_parts_are_left_alone(output: Output) -> None:
    output.begin(MANIFEST, resume=False, overwrite=False)
    (output.folder / "notes.txt").write_text("precious")
    with pytest.raises(InvalidInputError, match="not of this tool and were left alone"):
        again(output, resume=False, overwrite=True)
    assert (output.folder / "notes.txt").read_text() == "precious"


def test_parts_without_a_manifest_and_a_broken_one_are_refused(output: Output) -> None:
    output.begin(MANIFEST, resume=False, overwrite=False)
    output.write_part(0, [some_row(0)])
    manifest = output.folder / "manifest.json"
    manifest.write_text("{")
    with pytest.raises(InvalidInputError, match="manifest.json cannot be read"):
        again(output)
    manifest.write_text("{}")
    with pytest.raises(InvalidInputError, match=r"cannot be read \(it is not of this tool\)"):
        again(output)
    manifest.unlink()
    with pytest.raises(InvalidInputError, match="parts but no manifest.json"):
        again(output)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="cannot be written to .*choose another folder"):
        Output(tmp_path / "file" / "scores.jsonl").begin(MANIFEST, resume=False, overwrite=False)


@pytest.mark.parametrize("step", ["part", "merge"])
def test_a_full_disk_says_what_to_do(output: Output, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was scored is there for --resume."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    output.begin(MANIFEST, resume=False, overwrite=False)
    output.write_part(0, [some_row(0)])
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        patched.setattr("logitless_hf.score.parquet.write", lambda *_, **__: full(0))
        with pytest.raises(InvalidInputError, match=r"cannot be written to any more \(.*No space left.*--resume"):
            output.write_part(1, [some_row(1)]) if step == "part" else merge(output)
    assert output.has_part(0)
    assert not output.has_part(1)
    again(output)
    output.write_part(1, [some_row(1)])
    merge(output, records=2)
    assert [row["record"] for row in rows_of(output)] == [0, 1]


def test_a_file_of_others_has_no_metadata(output: Output) -> None:
    assert output.metadata() is None
    output.path.write_text("something else")
    assert output.metadata() is None


OTHER: dict[str, Any] = {"options": {"temperature": 3.0, "dtype": None}, "input": {"sha256": "aa"}}


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}], ids=str)
def test_a_second_run_is_kept_out_until_the_first_ends(output: Output, how: dict[str, bool]) -> None:
    output.begin(MANIFEST, resume=False, overwrite=False)
    second = Output(output.path)
    with pytest.raises(InvalidInputError, match=rf"another run is at work in {output.folder}; wait until it ends"):
        again(second, OTHER, **{"resume": False, **how})
    output.write_part(0, [some_row(0)])
    merge(output)
    assert not output.folder.exists()
    assert len(rows_of(output)) == 1
    again(second, OTHER, resume=False, overwrite=True)  # the claim went with the run
    second.close()


def no_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("run", [OTHER, MANIFEST], ids=["other", "same"])
def test_without_locks_an_older_run_stops(output: Output, run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    output.begin(MANIFEST, resume=False, overwrite=False)
    second = Output(output.path)
    again(second, run, resume=False)
    with pytest.raises(LogitlessError, match=f"another run has taken {output.folder} over"):
        output.write_part(0, [some_row(0)])
    second.write_part(0, [some_row(0)])
    with pytest.raises(LogitlessError, match=f"another run has taken {output.folder} over"):
        merge(output)
    merge(second, run=run)
    assert run_of(second) == run


def test_another_rank_of_a_dead_run_does_not_write_into_the_next(output: Output) -> None:
    output.begin(MANIFEST, resume=False, overwrite=False)
    rank = Output(output.path)
    rank.join(MANIFEST)
    rank.write_part(1, [some_row(1)])
    again(output)
    rank.write_part(2, [some_row(2)])  # its scores are the same
    again(output, OTHER, resume=False, overwrite=True)
    with pytest.raises(LogitlessError, match="another run has taken"):
        rank.write_part(1, [some_row(1)])


def test_resuming_beside_a_finished_output_of_another_run(output: Output) -> None:
    output.begin(MANIFEST, resume=False, overwrite=False)
    output.write_part(0, [some_row(0)])
    merge(output)
    before = output.path.read_bytes()
    output.folder.mkdir()
    with pytest.raises(InvalidInputError, match="temperature was 1.0 and is now 3.0"):
        again(output, OTHER)
    again(output, OTHER, resume=False, overwrite=True)  # and killed before its first part
    for run in (MANIFEST, {**OTHER, "input": {"sha256": "bb"}}):
        with pytest.raises(InvalidInputError, match="is of another run"):
            again(output, run)
    assert output.path.read_bytes() == before
    again(output, OTHER)
    output.write_part(0, [some_row(0)])
    merge(output, run=OTHER)
    assert run_of(output) == OTHER


def test_an_empty_folder_beside_a_finished_output_is_no_run(output: Output) -> None:
    output.begin(MANIFEST, resume=False, overwrite=False)
    output.write_part(0, [some_row(0)])
    merge(output)
    output.folder.mkdir()
    assert output.is_complete()


def test_files_of_others_beside_the_output_are_left_alone(output: Output) -> None:
    others = [output.path.with_name(output.path.name + end) for end in (".tmp", ".meta.json.tmp")]
    for other in others:
        other.write_text("precious")
    output.begin(MANIFEST, resume=False, overwrite=False)
    output.write_part(0, [some_row(0)])
    merge(output)
    assert [other.read_text() for other in others] == ["precious"] * 2


@pytest.mark.parametrize("content", ["precious", "[1]", '{"run": 1}'])
def test_metadata_of_others_are_not_replaced_unasked(tmp_path: Path, content: str) -> None:
    output = Output(tmp_path / "v.jsonl")
    output.meta_path.write_text(content)
    with pytest.raises(InvalidInputError, match="v.jsonl.meta.json exists; give --overwrite"):
        output.refuse_existing(resume=False, overwrite=False)
    with pytest.raises(InvalidInputError, match="v.jsonl.meta.json, .*, is not of this tool; move it away"):
        output.refuse_existing(resume=True, overwrite=False)
    output.refuse_existing(resume=False, overwrite=True)
    Output(tmp_path / "v.parquet").refuse_existing(resume=False, overwrite=False)


DAMAGES: dict[str, Callable[[list[str]], list[str]] | None] = {
    "cut": lambda lines: [*lines[:-1], lines[-1][:-20]],
    "no end of line": lambda lines: [*lines[:-1], lines[-1].rstrip()],
    "lacking": lambda lines: lines[:-1],
    "empty": lambda lines: [],
    "swapped": lambda lines: lines[::-1],
    "doubled": lambda lines: [*lines, lines[-1]],
    "one more": lambda lines: [*lines, json.dumps(some_row(4)) + "\n"],
    "one digit": lambda lines: [lines[0], lines[1].replace("-0.4", "-0.5"), lines[2]],
    "no row": lambda lines: [lines[0], "[]\n"],
    "no file": None,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_part_is_named_and_scored_again(output: Output, damage: Any) -> None:
    output.begin(MANIFEST, resume=False, overwrite=False)
    whole = [some_row(2), some_row(3)]
    output.write_part(0, [some_row(0), some_row(1)])
    output.write_part(1, whole)
    output.write_part(2, [some_row(4)])
    part = output.folder / "part-000000001.jsonl"
    lines = part.read_text().splitlines(keepends=True)
    part.unlink()
    if damage is not None:
        part.write_text("".join(damage(lines)))
    with pytest.raises(InvalidInputError, match=rf"the part {part} is damaged .* records 2 to 3. Remove"):
        merge(output, 5, 2)
    assert not output.path.exists()
    part.unlink(missing_ok=True)
    again(output)
    output.write_part(1, whole)
    merge(output, 5, 2)
    assert [row["record"] for row in rows_of(output)] == [0, 1, 2, 3, 4]


def test_a_part_in_the_place_of_another_is_damage(output: Output) -> None:
    output.begin(MANIFEST, resume=False, overwrite=False)
    output.write_part(0, [some_row(0)])
    (output.folder / "part-000000001.jsonl").write_bytes((output.folder / "part-000000000.jsonl").read_bytes())
    with pytest.raises(InvalidInputError, match="part-000000001.jsonl is damaged .it holds other records.; expected"):
        merge(output, 2, 1)


@pytest.mark.parametrize("damage", ["cut", "one byte"])
def test_a_damaged_output_is_not_whole(output: Output, damage: str) -> None:
    output.begin(MANIFEST, resume=False, overwrite=False)
    output.write_part(0, [some_row(0), some_row(1)])
    merge(output, 2, 2)
    output.check_whole(2)
    content = output.path.read_bytes()
    at = content.index(b"0.1") if output.path.suffix == ".jsonl" else 40  # of the file's first page
    changed = content[:-9] if damage == "cut" else content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    output.path.write_bytes(changed)
    with pytest.raises(InvalidInputError, match=rf"--resume: {output.path} is damaged .*begin anew with --overwrite"):
        output.check_whole(2)


def test_an_output_of_fewer_records_is_not_whole(tmp_path: Path) -> None:
    output = Output(tmp_path / "scores.parquet")
    output.begin(MANIFEST, resume=False, overwrite=False)
    output.write_part(0, [some_row(0)])
    merge(output)
    with pytest.raises(InvalidInputError, match="it holds 1 records., expected 2 records"):
        output.check_whole(2)


def test_a_file_in_the_place_of_the_folder_is_refused(output: Output) -> None:
    output.folder.write_text("precious")
    with pytest.raises(InvalidInputError, match=r"parts is a file, but a run keeps its work in a folder"):
        output.check_paths()
    assert output.folder.read_text() == "precious"


@pytest.mark.parametrize("end", ["", ".meta.json", ".parts"])
def test_links_are_refused(tmp_path: Path, end: str) -> None:
    link = tmp_path / f"scores.jsonl{end}"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidInputError, match=f"{link} is a symbolic link.* give the name of the file"):
        Output(tmp_path / "scores.jsonl").check_paths()


@pytest.mark.parametrize("end", ["", ".meta.json", ".parts/part-000000000.jsonl", ".parts/notes.jsonl"])
@pytest.mark.parametrize("linked", [False, True], ids=["itself", "link"])
def test_what_is_read_is_not_written(tmp_path: Path, end: str, linked: bool) -> None:
    read = tmp_path / f"scores.jsonl{end}"
    read.parent.mkdir(exist_ok=True)
    read.write_text("precious")
    if linked:
        (tmp_path / "link").symlink_to(read)
        read = tmp_path / "link"
    with pytest.raises(InvalidInputError, match="the input; choose another name"):
        Output(tmp_path / "scores.jsonl").check_paths(input=read)
