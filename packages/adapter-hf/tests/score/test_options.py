from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from logitless.errors import LogitlessError, NotFoundError
from logitless_hf.score import options as module
from logitless_hf.score.options import Options

BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.0}, "--temperature: got 0.0, expected a finite number above 0"),
    ({"temperature": -1.0}, "--temperature: got -1.0"),
    ({"temperature": math.nan}, "--temperature: got nan"),
    ({"temperature": math.inf}, "--temperature: got inf"),
    ({"max_tokens_per_batch": 0}, "--max-tokens-per-batch: got 0, expected 1 or more"),
    ({"records_per_part": -3}, "--records-per-part: got -3"),
    ({"dtype": "float8"}, "--dtype: got 'float8', expected bfloat16, float16"),
    ({"device": "abacus"}, "--device: got 'abacus', which cannot be used here"),
    ({"device": "meta"}, "--device: got 'meta'"),
    ({"backend": "abacus"}, "--backend: got 'abacus', expected one of those installed .*pip install logitless-torch"),
    ({"resume": True, "overwrite": True}, "--resume and --overwrite: give one"),
    ({"output": "scores.csv"}, "--output: got .*scores.csv, expected a name that ends in .parquet or .jsonl"),
    ({"output": "."}, "--output: "),
    ({"output": "none/scores.jsonl"}, "--output: the folder .*none does not exist"),
    ({"output": "folder.jsonl"}, "--output: got .*folder.jsonl, which is a folder"),
    ({"output": "records.jsonl"}, "--output: got .*records.jsonl, but .*records.jsonl, .* is the input"),
    ({"output": "records.jsonl/scores.jsonl"}, "--output: the folder .*records.jsonl does not exist"),
]


def make(tmp_path: Path, **changes: Any) -> Options:
    (tmp_path / "records.jsonl").touch()
    (tmp_path / "folder.jsonl").mkdir(exist_ok=True)
    output = tmp_path / changes.pop("output", "scores.jsonl")
    return Options(model=tmp_path, input=tmp_path / "records.jsonl", output=output, **changes)


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[str(case[0]) for case in BAD])
def test_a_bad_option_is_refused_by_its_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LogitlessError, match=message):
        make(tmp_path, **changes).check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogitlessError, match="--device: got 'cuda', which cannot be used here"):
        make(tmp_path, device="cuda").check()
    assert make(tmp_path).torch_device(0) == torch.device("cpu")


def test_a_time_to_join_that_is_none_is_refused(tmp_path: Path) -> None:
    assert make(tmp_path).join_timeout == 1800
    with pytest.raises(ValueError, match="join_timeout"):
        make(tmp_path, join_timeout=0)


def test_good_options_pass(tmp_path: Path) -> None:
    options = make(tmp_path, dtype="bfloat16", device="cpu", temperature=0.7, resume=True)
    options.check()
    assert options.torch_dtype() == torch.bfloat16
    assert make(tmp_path).torch_dtype() is None


def test_parquet_without_pyarrow_names_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotFoundError, match=r"pip install 'logitless-hf\[score\]'"):
        make(tmp_path, output="scores.parquet").check()
    make(tmp_path, output="scores.jsonl").check()
