"""The tables of the pages are those that the results give."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_current(tables: ModuleType) -> None:
    for name in tables.PAGES:
        text = (ROOT / name).read_text()
        assert tables.REGION.search(text), f"{name} has no table"
        assert tables.rewritten(text) == text, f"run python benchmarks/tables.py: {name} is not current"


def test_every_marker_is_understood(tables: ModuleType) -> None:
    for name in tables.PAGES:
        text = (ROOT / name).read_text()
        assert len(re.findall("<!-- table", text)) == len(tables.REGION.findall(text))


def row(name: str, kind: str, mode: str, median: float, **more: Any) -> dict[str, Any]:
    figures = {"outputs": "both", "limit": "2NDV", "ratio": median / 2.0, "peak_gib": 0.25, "errors": {}}
    return {"name": name, "kind": kind, "mode": mode, "median_ms": median, **figures, **more}


@pytest.fixture
def record() -> dict[str, Any]:
    one = [
        row("products, 2NDV", "limit", "forward", 2.0),
        row("triton: forward", "ours", "forward", 3.0, errors={"log_probs": 1e-5}),
        row("quack", "peer", "backward", 9.0, outputs="loss"),
    ]
    two = [row("triton: forward", "ours", "forward", 5.0, errors={"log_probs": 2e-5})]
    sizes = {"tokens": 1, "hidden": 2, "vocab": 3}
    return {
        "date": "2026-01-01",
        "device": {"type": "cuda", "name": "a card"},
        "versions": {"torch": "2.11", "trl": None},
        "dtype": "bfloat16",
        "shapes": {
            "s1": {**sizes, "rounds": 3, "rows": one, "not_run": {"verl": "not installed"}},
            "s2": {**sizes, "rounds": 11, "rows": two, "not_run": {"verl": "not installed"}},
        },
    }


def test_times(tables: ModuleType, record: dict[str, Any]) -> None:
    assert tables.times(record).splitlines() == [
        "| ms (peak GiB) | S1 | S2 |",
        "| --- | --- | --- |",
        "| N, D, V | 1, 2, 3 | 1, 2, 3 |",
        "| *forward* |  |  |",
        "| matrix products alone, 2NDV | 2.0 (0.2) | – |",
        "| **forward** | 3.0 (0.2) | 5.0 (0.2) |",
        "| *forward + backward* |  |  |",
        "| quack, loss only | 9.0 (0.2) | – |",
    ]


def test_ratios_and_errors(tables: ModuleType, record: dict[str, Any]) -> None:
    assert tables.ratios(record).splitlines()[-1] == "| **forward** | 1.500 × 2NDV | 2.500 × 2NDV |"
    assert tables.errors(record).splitlines()[2:] == ["| **forward** | 2.0e-05 | – | – | – |"]


def test_setting(tables: ModuleType, record: dict[str, Any]) -> None:
    assert tables.setting(record).splitlines() == [
        "a card, bfloat16, 2026-01-01, medians of 3 to 11 runs; torch 2.11.",
        "- not run at S1 S2: verl: not installed",
    ]


def test_results_of_several_files(
    tables: ModuleType, record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    sizes = {"tokens": 1, "hidden": 2, "vocab": 3, "rounds": 3}
    again = row("triton: forward", "ours", "forward", 99.0)
    more = {**sizes, "rows": [again, row("verl", "peer", "forward", 8.0)], "not_run": {"cce": "it broke"}}
    other = {**record, "shapes": {"s2": more, "l": {**sizes, "rows": [again], "not_run": {}}}}
    (tmp_path / "one.json").write_text(json.dumps(record))
    (tmp_path / "two.json").write_text(json.dumps(other))
    (tmp_path / "cpu.json").write_text(json.dumps({**other, "device": {"type": "cpu", "name": "x"}}))
    found = tables.joined("one.json+two.json")["shapes"]
    assert list(found) == ["s1", "s2", "l"]
    assert [(found_row["name"], found_row["median_ms"]) for found_row in found["s2"]["rows"]] == [
        ("triton: forward", 5.0),
        ("verl", 8.0),
    ]
    assert found["s2"]["not_run"] == {"verl": "not installed", "cce": "it broke"}
    assert found["l"]["rows"][0]["median_ms"] == 99.0
    with pytest.raises(SystemExit, match="they make no one table"):
        tables.joined("one.json+cpu.json")


def test_against_logits(tables: ModuleType) -> None:
    rows = [row("full logits, eager", "logits", "backward", 2000.0), row("torch: kept", "ours", "backward", 500.0)]
    found = tables.against_logits({"shapes": {"custom": {"rows": rows}}}).splitlines()
    assert found[2:] == [
        "| full logits, eager | 2.00 | 1.00 |",
        "| **kept (`keep_bytes` for all logits)** | 0.50 | 0.25 |",
    ]


SCRIPTS = {"steps": "runs", "checked": "errors", "engine": "relative_errors", "divergences": "results"}
SCRIPTS["kept-sets"] = "results"


def test_the_results_behind_them_have_the_form_of_their_kind(tables: ModuleType) -> None:
    pages = "".join((ROOT / name).read_text() for name in tables.PAGES)
    wanted = {(kind, file) for _, kind, joined, *_ in tables.REGION.findall(pages) for file in joined.split("+")}
    assert wanted
    for kind, file in sorted(wanted):
        keys = {SCRIPTS[kind]} if kind in SCRIPTS else {"device", "versions", "dtype", "shapes"}
        assert {"date", *keys} <= set(json.loads((tables.RESULTS / file).read_text())), file


def test_steps(tables: ModuleType) -> None:
    runs = {"ours": {"median_seconds": 0.5, "peak_bytes": 3 << 29}, "theirs": {"not_run": "out of memory"}}
    found = tables.steps({"card": "a card", "date": "2026-01-01", "versions": {"torch": "2.11"}, "runs": runs})
    assert found.splitlines()[0] == "a card, 2026-01-01; torch 2.11."
    assert found.splitlines()[-2:] == ["| ours | 0.500 | 1.5 |", "| theirs | out of memory |  |"]


def test_the_largest_of_the_gradients(tables: ModuleType) -> None:
    keys = ("transformer_engine", "ours", "between_them")
    each = {"log_probs": 1e-3, "gradient of a": 0.25, "gradient of b": 0.5}
    found = tables.engine({"relative_errors": {name: dict.fromkeys(keys, error) for name, error in each.items()}})
    assert found.splitlines()[2:] == [
        "| log_probs | 1.0e-03 | 1.0e-03 | 1.0e-03 |",
        "| largest of the gradients | 5.0e-01 | 5.0e-01 | 5.0e-01 |",
    ]


@pytest.fixture
def script() -> dict[str, Any]:
    errors = {"mean": 1e-7, "divergence": 1e-6, "d_weight": 0.002}
    of_the_mean = {"mean": 2e-7, "d_weight": 0.003}
    rows = [
        row("TRL", "peer", "backward", 4.0, errors=of_the_mean, set="k"),
        row("triton, k", "ours", "backward", 3.0, errors=errors, set="k"),
        row("triton, k", "ours", "forward", 1.0, errors=errors, set="k"),
        row("triton", "ours", "backward", 2.0, errors=errors, set="k"),
    ]
    result = {"direction": "jsd", "std": 5.0, "rows": rows, "not_run": {"Liger": "it broke"}, "kept_tokens": {"k": 50}}
    about = {"date": "2026-01-01", "device": {"name": "a card"}, "versions": {"torch": "2.11"}, "backend": "triton"}
    return {**about, "results": [result]}


def test_divergences(tables: ModuleType, script: dict[str, Any]) -> None:
    assert tables.divergences(script).splitlines()[-5:] == [
        "| *jsd* |  |  |  |  |  |  |",
        "| **logitless** | 2.0 | 1.00 | 0.2 | 1.0e-07 | 1.0e-06 | 2.0e-03 |",
        "| **logitless, k** | 3.0 | 1.50 | 0.2 | 1.0e-07 | 1.0e-06 | 2.0e-03 |",
        "| TRL | 4.0 | 2.00 | 0.2 | 2.0e-07 | – | 3.0e-03 |",
        "| not run: Liger, it broke |  |  |  |  |  |  |",
    ]


def test_kept_sets(tables: ModuleType, script: dict[str, Any]) -> None:
    assert tables.kept_sets(script).splitlines()[-2:] == [
        "| *logits of standard deviation 5* |  |  |  |",
        "| **logitless**, k | 50 | 1.0 | 0.50 |",
    ]
