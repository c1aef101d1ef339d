"""`logitless bench` on a CPU: the gate, what is refused and why, and what it leaves behind."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from logitless.bench import peers as peers_module
from logitless.bench.candidates import ours, products, scored
from logitless.bench.command import bench, run_shape
from logitless.bench.gate import Gate, WrongResultError
from logitless.bench.inputs import SHAPES, Inputs, Shape, chosen_shapes
from logitless.bench.peers import PEERS, Peer, chosen_peers
from logitless.bench.record import draw
from logitless.doctor import call_request
from logitless.errors import InvalidInputError, LogitlessError, NotFoundError, UnsupportedError
from logitless.testing import ReferenceBackend, installed
from logitless.types import Forwarded, Gradients, Request

pytestmark = pytest.mark.usefixtures("reference_backend")

CPU = torch.device("cpu")
TINY = Shape("tiny", 150, 8, 33)  # more tokens than the gate looks at
SIZES = ("--tokens", "40", "--hidden", "8", "--vocab", "33", "--rounds", "3", "--seconds", "0")


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, [*SIZES, *arguments])


def tiny(dtype: torch.dtype = torch.float32) -> Inputs:
    return Inputs(TINY, dtype, CPU)


class OffForward(ReferenceBackend):
    name = "off"

    def forward(self, *args: Any, **options: Any) -> Forwarded:
        found = super().forward(*args, **options)
        return replace(found, log_probs=found.log_probs - 1e-3)


class OffBackward(ReferenceBackend):
    name = "off"

    def backward(self, *args: Any, **options: Any) -> Gradients:
        found = super().backward(*args, **options)
        return replace(found, weight=found.weight * 1.0001)


class Broken(ReferenceBackend):
    name = "off"

    def forward(self, *args: Any, **options: Any) -> Forwarded:
        raise RuntimeError("a bug")


class Refuses(ReferenceBackend):
    name = "picky"

    def supports(self, request: Request) -> str | None:
        return "it is picky"


def test_results_have_every_key(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    done = run("--peers", "eager", "--ways", "all", "--json", str(path))
    assert done.exit_code == 0, done.output
    record = json.loads(path.read_text())
    assert list(record) == ["date", "device", "versions", "dtype", "shapes"]
    assert record["device"]["type"] == "cpu"
    assert record["dtype"] == "float32"
    assert record["versions"]["torch"] == torch.__version__
    found = record["shapes"]["custom"]
    assert {name: found[name] for name in ("tokens", "hidden", "vocab", "rounds", "not_run")} == {
        "tokens": 40,
        "hidden": 8,
        "vocab": 33,
        "rounds": 3,
        "not_run": {},
    }
    names = [row["name"] for row in found["rows"]]
    assert len(names) == 3 + 12 + 2
    assert names.count("full logits, eager") == 2
    for row in found["rows"]:
        low, high = row["quartiles_ms"]
        assert 0 < low <= row["median_ms"] <= high
        assert row["processor_ms"] is not None
        assert row["peak_gib"] > 0 or row["kind"] == "limit"
        base = next(other for other in found["rows"] if other["name"] == f"products, {row['limit']}")
        assert row["ratio"] == row["median_ms"] / base["median_ms"]
        expected = {"log_probs", "entropy", *(("d_hidden", "d_weight") if row["mode"] == "backward" else ())}
        assert set(row["errors"]) == (set() if row["kind"] == "limit" else expected)
    for row in found["rows"]:
        assert row["name"] in done.stdout


def test_a_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--backends", "reference", "--peers", "none", "--ways", "forward", "--mode", "forward")
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    assert run(*arguments).stderr == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes a terminal of any stream
    done = run(*arguments)
    for stands in ("gate", "memory", "rounds"):
        assert f": {stands} " in done.stderr
        assert f": {stands} " not in done.stdout
    assert "2/3" in done.stderr


def test_modes_and_ways(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert run("--peers", "none", "--mode", "forward", "--json", str(path)).exit_code == 0
    rows = json.loads(path.read_text())["shapes"]["custom"]["rows"]
    assert [row["name"] for row in rows] == ["products, 2NDV", "reference: forward"]


@pytest.mark.parametrize("planted", [OffForward, OffBackward])
def test_a_wrong_backend_is_not_timed(planted: type[ReferenceBackend], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with installed(planted(), alone=True):
        done = run("--peers", "none", "--json", str(path))
    assert isinstance(done.exception, WrongResultError)
    assert "nothing is timed" in str(done.exception)
    assert not path.exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_way_passes_the_gate(dtype: torch.dtype) -> None:
    inputs = tiny(dtype)
    gate = Gate(inputs)
    ways = ours(inputs, "reference", {"forward", "recompute", "kept-log-probs", "single-pass", "buffer", "ignored"})
    assert len(ways) == 7
    for candidate in ways:
        errors = gate.check(candidate)
        assert ("d_weight" in errors) == (candidate.mode == "backward")


def wrong_label(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return peers_module.full_logits(hidden, weight, (labels + 1) % len(weight))


def summed(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, None]:
    log_p = (hidden @ weight.T).log_softmax(-1)
    live = labels != -100
    return -log_p[live].gather(-1, labels[live].unsqueeze(-1)).sum(), None


def test_the_gate_sees_a_loss_alone() -> None:
    inputs = tiny()
    forward, backward = scored(inputs, "summed", "peer", summed, "8NDV", "loss")
    assert Gate(inputs).check(forward)["log_probs"] < 1e-5
    errors = Gate(inputs).check(backward)
    assert set(errors) == {"log_probs", "d_hidden", "d_weight"}
    assert max(errors.values()) < 1e-5
    assert (inputs.labels != -100).all()


def test_a_wrong_peer_is_listed_not_timed() -> None:
    result = small_run({"wrong": Peer("wrong", "torch", lambda: wrong_label, "8NDV")})
    assert "its log_probs is off by" in result.not_run["wrong, forward"]
    assert "its log_probs is off by" in result.not_run["wrong, backward"]
    assert not result.failed


def small_run(peers: dict[str, Peer]) -> Any:
    plan: dict[str, Any] = {"ways": ["forward"], "modes": ["forward", "backward"], "rounds": 1, "seconds": 0.0}
    return run_shape(TINY, call_request("cpu", "float32"), backends=["reference"], peers=peers, **plan)


def test_reasons_of_what_is_not_run() -> None:
    def broken() -> Any:
        raise ImportError("no such symbol")

    def raising() -> Any:
        def scorer(*args: Tensor) -> Any:
            raise RuntimeError("it wants\n  tiles")

        return scorer

    def hungry() -> Any:
        def scorer(*args: Tensor) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 37.09 GiB")

        return scorer

    peers = {
        "hungry": Peer("hungry", "torch", hungry, "8NDV"),
        "absent": Peer("absent", "no-such-dist", broken, "8NDV"),
        "broken": Peer("broken", "torch", broken, "8NDV"),
        "raising": Peer("raising", "torch", raising, "8NDV"),
        "gpu": Peer("gpu", "torch", broken, "8NDV", gpu=True),
    }
    assert small_run(peers).not_run == {
        "absent": "not installed; pip install no-such-dist",
        "broken": "ImportError: no such symbol",
        "gpu": "it needs an NVIDIA GPU, and this run is on cpu",
        "hungry, forward": "out of memory",
        "hungry, backward": "out of memory",
        "raising, forward": "RuntimeError: it wants tiles",
        "raising, backward": "RuntimeError: it wants tiles",
    }


def test_a_bug_of_this_op_fails_the_command() -> None:
    with installed(Broken(), alone=True):
        done = run("--peers", "none")
    assert done.exit_code == 1
    assert "not run: off: forward: RuntimeError: a bug" in done.stdout


def test_a_backend_that_cannot_serve_is_listed_or_if_named_refused() -> None:
    with installed(Refuses(), ReferenceBackend(), alone=True):
        done = run("--peers", "none", "--ways", "forward")
        assert done.exit_code == 0
        assert "not run: backend picky: backend 'picky' cannot serve this call: it is picky" in done.stdout
        assert isinstance(run("--backends", "picky").exception, UnsupportedError)
    with installed(Refuses(), alone=True):
        assert isinstance(run("--peers", "none").exception, UnsupportedError)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--peers", "eager,moon"), "--peers: got 'moon', expected all, none, or some of eager"),
        (("--ways", "fast"), "--ways: got 'fast', expected some of forward"),
        (("--mode", "sideways"), "--mode: got 'sideways', expected some of forward, backward"),
        (("--shapes", "s1"), "--shapes goes without --tokens"),
        (("--vocab", "0"), "--vocab: got 0, expected a positive number"),
        (("--dtype", "int8"), "--dtype: got 'int8'"),
        (("--device", "moon"), "--device: got 'moon'"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert isinstance(done.exception, InvalidInputError)
    assert words in str(done.exception)


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        ("--json", ".", "which cannot be written"),
        ("--json", "file/out.json", "which cannot be written"),
        ("--plot", "file/out.png", "which cannot be written"),
        ("--plot", "out.xyz", "expected a name that ends in .png, .svg or .pdf"),
    ],
)
def test_results_that_could_not_be_written_are_told_before_they_are_measured(
    option: str, name: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    done = run(option, str(tmp_path / name))
    assert isinstance(done.exception, InvalidInputError)
    assert f"{option}: got {tmp_path / name}, " in str(done.exception)
    assert words in str(done.exception)
    assert done.stdout == ""
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_shapes() -> None:
    assert chosen_shapes("S1, l,s1", None, None, None, CPU) == [SHAPES["s1"], SHAPES["l"]]
    assert chosen_shapes(None, None, None, None, CPU) == [SHAPES["small"]]
    assert chosen_shapes(None, None, None, None, torch.device("cuda")) == [SHAPES["s2"]]
    assert chosen_shapes(None, 7, None, None, CPU) == [Shape("custom", 7, 576, 49152)]
    with pytest.raises(InvalidInputError, match=r"--shapes: got 's9'"):
        chosen_shapes("s9", None, None, None, CPU)


def test_logits_have_unit_variance() -> None:
    inputs = Inputs(Shape("square", 200, 64, 200), torch.float32, CPU)
    assert float((inputs.hidden @ inputs.weight.T).std()) == pytest.approx(1.0, abs=0.1)


def test_named_peers() -> None:
    assert chosen_peers("all") == PEERS
    assert chosen_peers("none") == {}
    assert list(chosen_peers("trl, eager")) == ["trl", "eager"]


def test_products_are_products() -> None:
    inputs = tiny()
    two, six, eight = (candidate.run() for candidate in products(inputs))
    z = inputs.hidden @ inputs.weight.T
    assert two.d_hidden is None
    for found in (six, eight):
        torch.testing.assert_close(found.log_probs, z)
        torch.testing.assert_close(found.d_hidden, z @ inputs.weight)
        torch.testing.assert_close(found.d_weight, z.T @ inputs.hidden)


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return real(name, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without)
        yield


@pytest.mark.usefixtures("no_matplotlib")
def test_a_plot_needs_matplotlib(tmp_path: Path) -> None:
    done = run("--plot", str(tmp_path / "out.png"))
    assert isinstance(done.exception, NotFoundError)
    assert "pip install 'logitless[plot]'" in str(done.exception)
    assert done.stdout == ""


def test_a_plot(tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    assert run("--peers", "eager", "--plot", str(path)).exit_code == 0
    drawn = path.read_text()
    assert "<svg" in drawn


def test_a_plots_whiskers_are_the_quartiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: list[Any] = []
    monkeypatch.setattr(Axes, "barh", lambda self, labels, widths, xerr, color: drawn.append((widths, xerr)))
    row = {"name": "ours", "kind": "ours", "mode": "forward", "outputs": "both"}
    row |= {"median_ms": 5.0, "quartiles_ms": [4.0, 8.0]}
    record = {"shapes": {"tiny": {"rows": [row]}}, "device": {"name": "cpu"}, "dtype": "float32", "date": "today"}
    draw(record, tmp_path / "out.svg")
    assert drawn == [([5.0], [[1.0], [3.0]])]


def test_it_is_a_command() -> None:
    from importlib.metadata import entry_points

    entry = entry_points(group="logitless.commands", name="bench")
    assert [found.load() for found in entry] == [bench]
    assert issubclass(WrongResultError, LogitlessError)
