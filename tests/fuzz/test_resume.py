"""What a run left on the disk, damaged before `--resume`: the scores come out exactly, or an error says what is wrong.

Nothing in between: no record lost, doubled or of another value; and `--overwrite` leads out of every error.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from common import TALLY, fuzzed
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from logitless.errors import InvalidInputError, LogitlessError
from logitless_hf.score import runner
from logitless_hf.score.options import Options
from logitless_hf.score.parquet import ROLLOUT_COLUMNS

pq = pytest.importorskip("pyarrow.parquet")
Damage = Callable[[random.Random, bytes, list[bytes]], "bytes | None"]  # None: the file goes


def lines(change: Callable[[random.Random, list[bytes]], Any]) -> Damage:
    def damage(rng: random.Random, content: bytes, others: list[bytes]) -> bytes:
        found = content.splitlines(keepends=True)
        change(rng, found)
        return b"".join(found)

    return damage


def flip(rng: random.Random, content: bytes, others: list[bytes]) -> bytes:
    if not content:
        return b"\x00"
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]


def digit(rng: random.Random, content: bytes, others: list[bytes]) -> bytes:
    at = [i for i, byte in enumerate(content) if byte in b"0123456789"]
    if not at:
        return content + b"1"
    place = rng.choice(at)
    return (
        content[:place]
        + rng.choice(b"0123456789".replace(content[place : place + 1], b"")).to_bytes(1, "big")
        + content[place + 1 :]
    )


DAMAGES: dict[str, Damage] = {
    "cut": lambda rng, content, others: content[: rng.randrange(len(content) + 1)],
    "one bit": flip,
    "one digit": digit,
    "gone": lambda rng, content, others: None,
    "empty": lambda rng, content, others: b"",
    "another file's": lambda rng, content, others: rng.choice(others),
    "more behind": lambda rng, content, others: content + rng.choice([b"\n", b"\x00", b"{}\n", content]),
    "zeros": lambda rng, content, others: bytes(len(content)),
    "other JSON": lambda rng, content, others: rng.choice([b"[]", b"null", b"{}", b'{"id": 1, "run": []}', b"1\n"]),
    "a line twice": lines(lambda rng, found: found.insert(0, rng.choice(found or [b""]))),
    "a line less": lines(lambda rng, found: found and found.pop(rng.randrange(len(found)))),
    "lines in another order": lines(lambda rng, found: rng.shuffle(found)),
}


class Stop(BaseException):
    pass


class Runs:
    """A run of seven records in four parts, whole and stopped, of either format."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.checkpoint, self.folder = checkpoint, folder
        self.input = folder / "records.jsonl"
        records = [{"input_ids": [(9 * n + i) % 400 for i in range(3 + n)], "prompt_length": 1} for n in range(7)]
        records[2] |= {"logprobs": [-0.5] * (len(records[2]["input_ids"]) - 1)}  # type: ignore[arg-type]
        self.input.write_text("".join(json.dumps(record) + "\n" for record in records))
        self.rows: list[dict[str, Any]] = []
        for suffix in (".jsonl", ".parquet"):
            for state in ("whole", "stopped"):
                (folder / f"{state}{suffix}").mkdir()
            self.run(folder / f"whole{suffix}/scores{suffix}")
            self.stop(folder / f"stopped{suffix}/scores{suffix}")
        self.rows = self.read(folder / "whole.jsonl/scores.jsonl")

    def run(self, output: Path, **changes: Any) -> None:
        options = {"model": self.checkpoint, "input": self.input, "device": "cpu", "records_per_part": 2, **changes}
        runner.run(Options(output=output, **options), Console(quiet=True))

    def stop(self, output: Path) -> None:
        """Ended before the last part."""
        score_batch, calls = runner.score_batch, 0

        def some(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise Stop
            return score_batch(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "score_batch", some)
            with pytest.raises(Stop):
                self.run(output)

    def read(self, path: Path) -> list[dict[str, Any]]:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in path.read_text().splitlines()]
        return list(pq.read_table(path).to_pylist())

    def check(self, path: Path, reported: bool) -> None:
        """The scores are there, to the bit, and nothing else."""
        rows = self.read(path)
        if path.suffix == ".parquet":  # float32, which the nine digits of JSONL give back
            for row, expected in zip(rows, self.rows, strict=True):
                for name in ("log_probs", "entropy"):
                    assert [float(f"{value:.9g}") for value in row[name]] == expected[name]
                    row[name] = expected[name]
        assert rows == self.rows
        assert set(rows[2]) >= set(ROLLOUT_COLUMNS)
        ends = ["", *([".meta.json"] if path.suffix == ".jsonl" else []), ".mismatch.json", ".mismatch.png"]
        left = {file.name for file in path.parent.iterdir()}
        assert left <= {path.name + end for end in ends}
        assert not reported or path.name + ".mismatch.json" in left


@pytest.fixture(scope="module")
def runs(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logitless_hf.score.mismatch.can_plot", lambda: False)
        return Runs(checkpoint, tmp_path_factory.mktemp("runs"))


@fuzzed(0.5)
@given(
    suffix=st.sampled_from([".jsonl", ".parquet"]),
    state=st.sampled_from(["whole", "stopped", "stopped"]),
    names=st.lists(st.sampled_from(sorted(DAMAGES)), min_size=1, max_size=2),
    seed=st.integers(0, 2**32),
)
def test_damaged_files(
    runs: Runs, tmp_path_factory: pytest.TempPathFactory, suffix: str, state: str, names: list[str], seed: int
) -> None:
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(runs.folder / f"{state}{suffix}", folder)
    output = folder / f"scores{suffix}"
    for name in names:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if not files:
            break
        path = rng.choice(files)
        content = DAMAGES[name](rng, path.read_bytes(), [file.read_bytes() for file in files])
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
    area = f"damaged files, {suffix}, {'a finished output' if state == 'whole' else 'an unfinished run'}"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logitless_hf.score.mismatch.can_plot", lambda: False)
        told: LogitlessError | None = None
        try:
            runs.run(output, resume=True)
        except InvalidInputError as error:
            told = error
        if told is None:
            runs.check(output, reported=state == "stopped")
            TALLY.right(area)
        else:
            outputs = {path for path in before if path.parent == folder}
            assert {path: path.read_bytes() for path in outputs} == {path: before[path] for path in outputs}
            TALLY.told(area, told)
            runs.run(output, overwrite=True)
            runs.check(output, reported=True)
    shutil.rmtree(folder.parent)
