"""How `logitless bench` calls other libraries' functions: with stand-ins that keep their conventions."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from logitless import reference
from logitless.bench import peers as peers_module
from logitless.bench.candidates import full_logits
from logitless.bench.command import run_shape
from logitless.bench.inputs import Shape
from logitless.bench.peers import PEERS, Peer
from logitless.doctor import call_request
from logitless.head import LMHead
from logitless.testing import random_example

VERL = ("verl", "verl.utils", "verl.utils.kernel")


def truth(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    out = reference.linear_log_probs(hidden, LMHead(weight), labels)
    assert out.entropy is not None
    return out.log_probs, out.entropy


def trl(hidden: Tensor, weight: Tensor, bias: None, labels: Tensor, temperature: float, *rest: Any) -> Any:
    assert (bias, temperature, rest[-1]) == (None, 1.0, ("entropy",))
    return (*truth(hidden, weight, labels), None)


def liger(hidden: Tensor, weight: Tensor, labels: Tensor, *rest: Any) -> Any:
    log_probs, entropy = truth(hidden, weight, labels)
    return -log_probs, entropy


def verl_triton(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, reduction: str, group: None) -> Any:
    assert (temperature, reduction, group) == (1.0, "none", None)
    return truth(hidden, weight, labels)


def cce(hidden: Tensor, weight: Tensor, labels: Tensor, *, reduction: str) -> Tensor:
    assert reduction == "none"
    return -truth(hidden, weight, labels)[0]


def quack(hidden: Tensor, weight: Tensor, labels: Tensor, *, reduction: str) -> Tensor:
    assert reduction == "sum"
    return -truth(hidden, weight, labels)[0].sum()


STAND_INS: dict[str, tuple[str, dict[str, Any]]] = {
    "trl": ("trl.kernels.chunked_logprob", {"ChunkedLogProbFunction": SimpleNamespace(apply=trl)}),
    "liger": (
        "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90",
        {"LigerFusedScaledCrossEntropySM90Function": SimpleNamespace(apply=liger)},
    ),
    "verl": ("verl.utils.kernel.linear_cross_entropy", {"linear_cross_entropy": verl_triton}),
    "verl-torch": (
        "verl.utils.experimental.torch_functional",
        {"FusedLinearForPPOFunction": SimpleNamespace(apply=truth)},
    ),
    "cce": ("cut_cross_entropy", {"linear_cross_entropy": cce}),
    "quack": ("quack.linear_cross_entropy", {"chunked_linear_cross_entropy": quack}),
}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Puts modules, or None for none of that name; afterwards all are as they were."""

    def put(name: str, module: Any) -> None:
        monkeypatch.setitem(sys.modules, name, module)
        if module is None:
            monkeypatch.delitem(sys.modules, name)

    return put


def load(name: str, modules: Callable[[str, Any], None]) -> Any:
    where, functions = STAND_INS[name]
    module = ModuleType(where)
    vars(module).update(functions)
    for parent in VERL:
        modules(parent, ModuleType(parent))
    modules(where, module)
    return PEERS[name].load()


@pytest.mark.parametrize("name", STAND_INS)
def test_each_is_called_as_its_library_wants(name: str, modules: Callable[[str, Any], None]) -> None:
    example = random_example(7, vocab=11, hidden_size=4, dtype=torch.float64)
    hidden, weight, labels = example.hidden.detach(), example.head.weight.detach(), example.labels.clamp(min=0)
    log_probs, entropy = load(name, modules)(hidden, weight, labels)
    expected, expected_entropy = truth(hidden, weight, labels)
    if PEERS[name].outputs == "loss":
        torch.testing.assert_close(log_probs, -expected.sum())
    else:
        torch.testing.assert_close(log_probs, expected)
    assert (entropy is None) == (PEERS[name].outputs != "both")
    if entropy is not None:
        torch.testing.assert_close(entropy, expected_entropy)


def test_trl_without_datasets(modules: Callable[[str, Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward asks the trainer's module for one helper, and that module's import needs `datasets`."""
    for name in ("trl.trainer", "trl.trainer.utils"):
        modules(name, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    load("trl", modules)
    helpers: Any = importlib.import_module("trl.trainer.utils")
    with helpers.maybe_gather_lm_head_ctx("a head") as found:
        assert found is None


def test_compiled_is_full_logits() -> None:
    example = random_example(7, vocab=11, hidden_size=4, dtype=torch.float64)
    inputs = (example.hidden.detach(), example.head.weight.detach(), example.labels.clamp(min=0))
    with torch.compiler.set_stance("force_eager"):
        got = PEERS["compiled"].load()(*inputs)
    torch.testing.assert_close(got, full_logits(*inputs), rtol=0.0, atol=0.0)


def test_parents_that_do_not_import_are_bare(
    tmp_path: Path, modules: Callable[[str, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "heavy" / "utils"
    inner.mkdir(parents=True)
    (tmp_path / "heavy" / "__init__.py").write_text("raise ImportError('a trainer')")
    (inner / "__init__.py").write_text("raise ImportError('a serving stack')")
    (inner / "kernel.py").write_text("ANSWER = 42")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("heavy", "heavy.utils", "heavy.utils.kernel"):
        modules(name, None)
    peers_module._bare("heavy", "heavy.utils")
    assert importlib.import_module("heavy.utils.kernel").ANSWER == 42
    bare = sys.modules["heavy"]
    peers_module._bare("heavy", "heavy.utils")
    assert sys.modules["heavy"] is bare


def test_bare_parents_of_what_is_not_there() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_library'"):
        peers_module._bare("no_such_library", "no_such_library.utils")


def small_run(peer: Peer, key: str) -> Any:
    plan: dict[str, Any] = {"ways": ["forward"], "modes": ["forward"], "rounds": 9, "seconds": 0.0}
    shape, request = Shape("tiny", 20, 8, 33), call_request("cpu", "float32")
    return run_shape(shape, request, backends=["reference"], peers={key: peer}, **plan)


@pytest.mark.usefixtures("reference_backend")
def test_what_cannot_be_traced_has_no_peak() -> None:
    """A CPU's peak is counted in a dispatch mode, in which a compiled function would be another one."""
    result = small_run(Peer("here", "torch", lambda: full_logits, "6NDV"), "compiled")
    peaks = {row.candidate.name: row.peak_gib for row in result.rows}
    assert list(peaks) == ["products, 2NDV", "reference: forward", "here"]
    assert [name for name, peak in peaks.items() if peak is None] == ["here"]


@pytest.mark.usefixtures("reference_backend")
def test_what_fails_at_its_second_run_is_listed() -> None:
    calls: list[int] = []

    def tired(*inputs: Tensor) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("its workspace is gone")
        return full_logits(*inputs)

    result = small_run(Peer("tired", "torch", lambda: tired, "6NDV"), "eager")
    assert result.not_run == {"tired, forward": "RuntimeError: its workspace is gone"}
    assert [row.candidate.name for row in result.rows] == ["products, 2NDV", "reference: forward"]
    assert [row.measured.rounds for row in result.rows] == [3, 3]  # of 9, since no second is left
