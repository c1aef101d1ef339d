"""Odd environments, command lines, configs and plugins: the command works, or says in a line what is wrong."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from common import TALLY, fuzzed
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import logitless
from logitless import _registry
from logitless.cli import app
from logitless.errors import LogitlessError

ODD = [
    "",
    " ",
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1e400",
    "9" * 30,
    "torch ",
    "TORCH",
    "../torch",
    "a\tb",
    "☺",
    "\udcff",
    "-",
]
words = st.one_of(st.sampled_from(ODD), st.text(st.characters(exclude_characters="\x00", codec="utf-8"), max_size=8))


def of(*values: str) -> st.SearchStrategy[str]:
    return st.one_of(st.sampled_from(values), words)


SCORE = {
    "--temperature": of("1", "0.7", "1e-31"),
    "--backend": of("torch", "triton", "abacus"),
    "--dtype": of("float32", "float64", "bfloat16", "int8"),
    "--device": of("cpu", "cuda", "meta", "cpu:3", "mps"),
    "--rollout-logprobs": of("raw", "processed"),
    "--max-tokens-per-batch": of("1", "100"),
    "--records-per-part": of("1", "3"),
    "--model": of(".", "/", "/dev/null", "records.jsonl"),
    "--input": of(".", "/dev/null", "none.jsonl", "model/config.json"),
    "--output": of(
        "scores.parquet", "scores.jsonl", "records.jsonl", "none/scores.jsonl", "model", "scores.csv", ".jsonl"
    ),
    "--resume": st.none(),
    "--overwrite": st.none(),
    "--abacus": words,
}
DOCTOR = {
    "--json": st.none(),
    "--model": of("model", ".", "/dev/null", "none"),
    "--backend": of("torch", "triton"),
    "--device": of("cpu", "cuda", "meta"),
    "--dtype": of("bfloat16", "float64", "int8"),
    "doctor": words,
}
BENCH = {
    "--shapes": of("s1,", ",", "none"),
    "--tokens": of("4", "1"),
    "--hidden": of("8", "1"),
    "--vocab": of("16", "1"),
    "--dtype": of("float32", "bfloat16"),
    "--device": of("cpu", "cuda"),
    "--mode": of("forward", "forward,forward"),
    "--ways": of("all", "forward", ",", "kept,forward"),
    "--backends": of("torch", "torch,torch", "triton", ","),
    "--peers": of("none", "eager", "abacus"),
    "--rounds": of("1", "2"),
    "--seconds": of("0", "0.01"),
    "--plot": of("plot.abacus", "none/plot.png"),
}
TUNE = {"--tokens": of("4"), "--hidden": of("8"), "--vocab": of("16"), "--dtype": of("float16"), "--device": of("cpu")}
COMMANDS: dict[str, tuple[dict[str, str], dict[str, st.SearchStrategy[str | None]]]] = {
    "score": ({"--model": "model", "--input": "records.jsonl", "--output": "scores.jsonl", "--device": "cpu"}, SCORE),
    "doctor": ({}, DOCTOR),
    "bench": (
        {"--tokens": "4", "--hidden": "8", "--vocab": "16", "--peers": "none", "--rounds": "1", "--seconds": "0"},
        BENCH,
    ),
    "tune": ({"--tokens": "4", "--hidden": "8", "--vocab": "16"}, TUNE),
}
ENVIRONMENT = {
    "LOGITLESS_BACKEND": of("torch", "triton"),
    "LOGITLESS_DEBUG": of("1", "yes"),
    "WORLD_SIZE": of("1", "2"),
    "RANK": of("0", "5"),
    "LOCAL_RANK": of("0", "5"),
}


@pytest.fixture(scope="module")
def place(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and three records."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "model").symlink_to(checkpoint)
    records = [{"input_ids": [1, 2, 3 + n], "prompt_length": 1, "logprobs": [-1.0, -2.0]} for n in range(3)]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def invoke(area: str, arguments: list[str], folder: Path, env: dict[str, str]) -> str | None:
    """What the command prints if it ends well; None if it told what is wrong, as a usage error or an error of ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in env.items():
            patch.setenv(name, value)
        ran = CliRunner().invoke(app, arguments, standalone_mode=False)
    error = ran.exception
    if error is None:
        TALLY.right(area)
        return ran.stdout if ran.return_value in (None, 0) else None  # 1: doctor's word that a backend cannot serve
    usage = any(base.__name__ == "ClickException" for base in type(error).__mro__)  # typer brings a click of its own
    if not (usage or isinstance(error, LogitlessError)):
        raise error
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    assert text.strip()
    TALLY.told(area, f"{type(error).__name__}: {text}")
    return None


@fuzzed(1)
@given(data=st.data(), command=st.sampled_from(sorted(COMMANDS)))
def test_commands(data: st.DataObject, command: str, place: Path) -> None:
    base, odd = COMMANDS[command]
    names = data.draw(st.lists(st.sampled_from(sorted(odd)), max_size=2, unique=True))
    given_: dict[str, str | None] = {**base, **{name: data.draw(odd[name]) for name in names}}
    env = data.draw(st.lists(st.sampled_from(sorted(ENVIRONMENT)), max_size=1))
    values = {name: data.draw(ENVIRONMENT[name]) for name in env}
    before = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
    arguments = [command, *(word for name, value in given_.items() for word in (name, value) if word is not None)]
    said = invoke(f"command line, {command}", arguments, place, values)
    if said is not None and command == "doctor" and "--json" in given_ and "--help" not in arguments:
        assert {"backends", "adapters", "chosen"} <= set(json.loads(said))
    left = {path.name: path for path in place.iterdir() if path.is_file()}
    assert (before.keys() <= left.keys()) or "--overwrite" in given_
    assert left["records.jsonl"].read_bytes() == before["records.jsonl"]
    output = given_.get("--output")
    if said is not None and command == "score" and output == "scores.jsonl" and "--input" not in names:
        rows = [json.loads(line) for line in (place / output).read_text().splitlines()]
        assert [row["record"] for row in rows] == [0, 1, 2]
    for name in left.keys() - {"records.jsonl"}:
        left[name].unlink()
    for parts in place.glob("*.parts"):
        for file in parts.iterdir():
            file.unlink()
        parts.rmdir()


CONFIG = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
FIELDS = (
    "model_type",
    "architectures",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "torch_dtype",
    "tie_word_embeddings",
)


@fuzzed(0.25)
@given(data=st.data())
def test_checkpoints_configs(data: st.DataObject, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("config")
    whole = json.loads((checkpoint / "config.json").read_text())
    names = data.draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=2))
    config = {**whole, **{name: data.draw(CONFIG) for name in names}}
    text = json.dumps(data.draw(st.sampled_from([config, config, config[names[0]]])))
    (folder / "config.json").write_text(text[: data.draw(st.sampled_from([len(text), len(text), len(text) // 2]))])
    said = invoke("a checkpoint's config, doctor", ["doctor", "--json", "--model", str(folder)], folder, {})
    assert said is not None
    for verdict in json.loads(said)["model"].values():
        assert verdict.get("ok") in (True, False, None)
        if verdict.get("ok") is False:
            assert verdict["reason"]


class Odd:
    """A plugin of which any attribute may be anything, or raise."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._attributes = attributes

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__.get("_attributes", {}).get(name, AttributeError(name))
        if isinstance(value, BaseException):
            raise value
        return value


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        raise error

    return call


anything = st.sampled_from([None, True, 0, 1, 2, 1.5, float("nan"), "1", "", [], {}, RuntimeError("odd"), KeyError()])
answers = st.one_of(
    anything, st.sampled_from([raising(ValueError("no")), raising(KeyError()), lambda *_: None, lambda *_: "no"])
)
plugins = st.fixed_dictionaries(
    {
        "name": st.just("odd"),
        "protocol": st.one_of(st.just(1), anything),
        "priority": st.one_of(st.just(1000), anything),
        "supports": answers,
        "inspect": answers,
        "features": anything,
        "make_forward": answers,
    }
).map(Odd)
VALUES = [
    "",
    ":",
    "json",
    "json:",
    ":dumps",
    "json:dumps",
    "no_such_module:x",
    "math:pi",
    "os:abc",
    "a b",
    "json:a.b",
    "json.:x",
    "☺:x",
]


class Dist:
    name, version = "odd-dist", "0.0"


@fuzzed(1)
@given(
    group=st.sampled_from([_registry.BACKENDS, _registry.ADAPTERS, _registry.COMMANDS]), plugin=plugins, data=st.data()
)
def test_plugins(group: str, plugin: Odd, data: st.DataObject) -> None:
    value = data.draw(st.one_of(st.none(), st.none(), st.sampled_from(VALUES)))
    entry = importlib.metadata.EntryPoint("odd", value or "json:dumps", group)
    vars(entry)["dist"] = Dist()
    if value is None:

        class Entry(type(entry)):  # type: ignore[misc]
            def load(self) -> Any:
                return plugin

        entry = Entry("odd", "odd:plugin", group)
        vars(entry)["dist"] = Dist()
    area = f"plugins, {group}"
    entries = _registry._entries
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            _registry, "_entries", lambda kind: {**entries(kind), **({"odd": (entry,)} if kind == group else {})}
        )
        _registry._attempt.cache_clear()
        status = next(line for line in _registry.statuses(group) if line.name == "odd")
        assert status.ok or status.reason
        others = [line.name for line in _registry.statuses(group) if line.ok and line.name != "odd"]
        assert (
            set(others)
            >= {_registry.BACKENDS: {"torch"}, _registry.ADAPTERS: {"hf"}, _registry.COMMANDS: {"bench"}}[group]
        )
        hidden, labels = torch.randn(3, 4), torch.arange(3)
        weight = torch.randn(7, 4)
        logitless.linear_log_probs(hidden, weight, labels, backend="torch")
        told = ""
        try:
            logitless.linear_log_probs(hidden, weight, labels, backend="odd")
        except (LogitlessError, TypeError, AttributeError) as error:
            told = f"{type(error).__name__}: {error}"
            ours = isinstance(error, LogitlessError)
        assert (
            "odd" in told if ours else group == _registry.BACKENDS and status.ok
        )  # it said that it serves, and did not
        told, ours = "", False  # it may serve
        try:
            logitless.make_forward(torch.nn.Linear(2, 2))
        except Exception as error:  # of its make_forward, its own
            told = str(error)
            ours = isinstance(error, LogitlessError)
        assert not ours or "odd: " in told or group != _registry.ADAPTERS
        assert ours or (group == _registry.ADAPTERS and status.ok)
        with pytest.MonkeyPatch.context() as quiet:
            quiet.setenv("LOGITLESS_BACKEND", "torch")
            said = invoke(area, ["doctor", "--json", "--model", os.devnull], Path("/"), {})
        assert said is not None
        row = [
            row
            for kind in ("backends", "adapters", "commands")
            for row in json.loads(said)[kind]
            if row["name"] == "odd"
        ]
        assert len(row) == 1
    _registry._attempt.cache_clear()
