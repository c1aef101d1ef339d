"""The command line: shape of what is printed, and exit codes."""

from __future__ import annotations

import json
import runpy
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

import logitless.cli
from logitless._registry import COMMANDS, PluginStatus
from logitless.errors import InvalidInputError, NotFoundError

pytestmark = pytest.mark.usefixtures("reference_backend")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(logitless.cli.app, list(arguments))


@pytest.fixture
def greet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command `greet` of another package."""

    def greet(name: Annotated[str, typer.Option(help="Whom.")] = "you") -> None:
        """Say hello."""
        if name == "nobody":
            raise InvalidInputError("name: got [nobody], expected [somebody]")
        print(f"hello {name}")

    def load(group: str, name: str) -> Any:
        assert group == COMMANDS
        if name != "greet":
            raise NotFoundError(f"no installed package provides the command {name!r}; pip install logitless-hf")
        return greet

    lines = [PluginStatus("greet", "acme", "1", True), PluginStatus("sulk", "acme", "1", False, "it does not load")]
    monkeypatch.setattr(logitless.cli, "statuses", lambda group: lines)
    monkeypatch.setattr(logitless.cli, "load", load)


def test_doctor_prints_json() -> None:
    done = run("doctor", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["chosen"] == "reference"
    for line in found["backends"] + found["adapters"] + found["commands"]:
        assert list(line) == ["name", "dist", "version", "ok", "reason"]


def test_it_runs_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["logitless", "doctor", "--json"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("logitless", run_name="__main__", alter_sys=True)
    assert not caught.value.code
    assert json.loads(capsys.readouterr().out)["chosen"] == "reference"


def test_doctor_prints_for_people() -> None:
    done = run("doctor")
    assert done.exit_code == 0
    assert "backends" in done.stdout
    assert "would run on reference" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["reference", "unknown", "unknown", "yes", "chosen"] in rows


def test_doctor_fails_where_the_requested_backend_cannot_serve() -> None:
    assert run("doctor", "--backend", "reference").exit_code == 0
    done = run("doctor", "--json", "--backend", "triton")
    assert done.exit_code == 1
    assert "pip install logitless-triton" in json.loads(done.stdout)["refused"]["triton"]
    told = run("doctor", "--backend", "triton")
    assert told.exit_code == 1
    assert "No backend can serve" in told.stdout


def test_doctor_fails_where_the_environments_backend_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITLESS_BACKEND", "triton")
    assert run("doctor").exit_code == 1


def test_unknown_option_is_a_usage_error() -> None:
    assert run("doctor", "--no-such").exit_code == 2


@pytest.mark.usefixtures("greet")
def test_a_plugins_command_runs_with_its_options() -> None:
    done = run("greet", "--name", "world")
    assert (done.exit_code, done.stdout) == (0, "hello world\n")


@pytest.mark.usefixtures("greet")
def test_help_lists_commands_that_load() -> None:
    done = run("--help")
    assert done.exit_code == 0
    assert "doctor" in done.stdout
    assert "greet" in done.stdout
    assert "sulk" not in done.stdout


@pytest.mark.usefixtures("greet")
def test_an_unknown_command_is_a_usage_error() -> None:
    assert run("no-such").exit_code == 2


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["logitless", *arguments])
    with pytest.raises(SystemExit) as caught:
        logitless.cli.main()
    return int(caught.value.code or 0)


@pytest.mark.usefixtures("greet")
def test_our_errors_end_with_their_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(monkeypatch, "greet", "--name", "nobody") == 1
    assert "error: name: got [nobody], expected [somebody]" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--json"]], ids=str)
def test_doctor_refuses_a_backend_that_nobody_knows_and_prints_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(monkeypatch, "doctor", "--backend", "typo", *arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: --backend: got 'typo', expected one of reference, ")


@pytest.mark.usefixtures("greet")
def test_a_command_of_a_missing_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "score") == 1
    assert "pip install logitless-hf" in capsys.readouterr().err


def test_an_interrupt_while_a_command_is_loaded_ends_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(logitless.cli, "app", interrupted)
    with pytest.raises(SystemExit) as ended:
        logitless.cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""
