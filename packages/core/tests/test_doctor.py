"""What `logitless doctor` knows, as data."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitless import _registry
from logitless.doctor import doctor, report
from logitless.errors import InvalidInputError, NotFoundError, UnsupportedError
from logitless.testing import ReferenceBackend, installed
from logitless.types import Request

pytestmark = pytest.mark.usefixtures("reference_backend")


class Picky(ReferenceBackend):
    name = "picky"
    priority = 50

    def supports(self, request: Request) -> str | None:
        return None if request.hidden_dtype == torch.float16 else "it wants float16"


def test_lists_are_statuses() -> None:
    found = report()
    assert found["backends"] == [
        {"name": "reference", "dist": "unknown", "version": "unknown", "ok": True, "reason": None}
    ]
    assert isinstance(found["adapters"], list)
    assert isinstance(found["commands"], list)
    assert "model" not in found
    json.dumps(found)


def test_the_choice_follows_the_request() -> None:
    with installed(ReferenceBackend(), Picky(), alone=True):
        assert report(dtype="float16")["chosen"] == "picky"
        found = report(dtype="bfloat16")
    assert found["chosen"] == "reference"
    assert found["refused"] == {"picky": "it wants float16"}
    assert found["request"]["dtype"] == "bfloat16"


def test_a_requested_backend_that_cannot_serve_is_not_replaced() -> None:
    with installed(ReferenceBackend(), Picky(), alone=True):
        found = report(backend="picky", dtype="float32")
    assert found["chosen"] is None
    assert found["refused"]["picky"] == "it wants float16"
    assert found["request"]["backend"] == "picky"


def test_a_backend_that_is_not_installed() -> None:
    found = report(backend="triton")
    assert found["chosen"] is None
    assert "pip install logitless-triton" in found["refused"]["triton"]


def test_the_environment_asks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITLESS_BACKEND", "triton")
    assert report()["chosen"] is None


def test_a_backend_that_nobody_knows_is_refused_by_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known = r"got 'typo', expected one of reference, torch \(pip install logitless-torch\), triton \(pip install "
    with pytest.raises(NotFoundError, match="^--backend: " + known):
        report(backend="typo")
    monkeypatch.setenv("LOGITLESS_BACKEND", "typo")
    with pytest.raises(NotFoundError, match="^use_backend or LOGITLESS_BACKEND: " + known):
        report()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "int8"}, "--dtype: got 'int8', expected one of bfloat16"),
        ({"device": "moon"}, "--device: got 'moon'"),
        ({"device": "meta"}, "--device: got 'meta', which holds no values"),
    ],
)
def test_wrong_arguments(arguments: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        report(**arguments)


def test_verdicts_of_adapters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(path: str) -> Any:
        raise UnsupportedError(f"{path} is no checkpoint")

    adapters = {
        "one": SimpleNamespace(protocol=1, inspect=lambda path: {"architecture": "Llama", "path": path}),
        "two": SimpleNamespace(protocol=1, inspect=refuse),
        "three": SimpleNamespace(protocol=1, inspect=lambda path: {}["model_type"]),
    }
    lines = [_registry.PluginStatus(name, "acme", "1", True) for name in adapters]
    monkeypatch.setattr("logitless.doctor.statuses", lambda group: lines if group == _registry.ADAPTERS else [])
    monkeypatch.setattr("logitless.doctor.load", lambda group, name: adapters[name])
    assert report(model="here")["model"] == {
        "one": {"architecture": "Llama", "path": "here"},
        "two": {"ok": False, "reason": "here is no checkpoint"},
        "three": {"ok": False, "reason": "its inspect() raised KeyError: 'model_type'"},
    }
    doctor(model="[here]")
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["architecture", "Llama"] in printed
    assert ["path", "[here]"] in printed  # as it is, not as markup
    assert ["reason", "[here]", "is", "no", "checkpoint"] in printed


def test_none_is_said_where_there_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("logitless.doctor.statuses", lambda group: [])
    monkeypatch.setenv("COLUMNS", "200")
    with installed(alone=True):
        doctor()
    printed = capsys.readouterr().out
    assert [line.strip() for line in printed.splitlines()].count("none") == 3
    assert "No backend can serve a call in bfloat16 on cpu: none is installed; pip install logitless-torch" in printed
