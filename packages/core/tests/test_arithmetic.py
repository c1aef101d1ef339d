"""The process's settings of precision are plain while a call runs, and then as they were."""

from __future__ import annotations

import operator
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitless import _arithmetic
from logitless._arithmetic import Undo, _accessors, _plain, _Settings
from logitless.testing import ReferenceBackend, installed, random_example
from logitless.types import Forwarded, Gradients


def test_short_sums_are_off_and_put_back() -> None:
    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(matmul, name) for name in names]
    try:
        for allowed in (True, False):
            for name in names:
                setattr(matmul, name, allowed)
            with _plain:
                assert not any(getattr(matmul, name) for name in names)
            assert [getattr(matmul, name) for name in names] == [allowed, allowed]
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)


def test_short_sums_of_a_torch_without_the_private_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    public = SimpleNamespace(allow_short=True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", public)
    monkeypatch.setattr(_arithmetic, "_SHORT_SUMS", [_accessors("allow_short"), _accessors("unknown")])
    with _Settings(_arithmetic._whole_sums):
        assert vars(public) == {"allow_short": False}
    assert vars(public) == {"allow_short": True}


def test_products_are_plain_until_the_last_call_ends() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with _plain:
            with _plain:
                assert torch.get_float32_matmul_precision() == "highest"
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("precision", "own"), [("highest", "tf32"), ("medium", "ieee")], ids=["tf32", "no-tf32"])
def test_a_precision_of_cublas_alone_is_put_back_alone(precision: str, own: str) -> None:
    """`allow_tf32 = True` says nothing of oneDNN, nor "ieee" of the older setting, which would set both."""
    matmul, onednn = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = torch.get_float32_matmul_precision(), matmul.fp32_precision, onednn.fp32_precision
    try:
        torch.set_float32_matmul_precision(precision)
        if own == "tf32":
            matmul.allow_tf32 = True
        else:
            matmul.fp32_precision = own
        settings = matmul.fp32_precision, onednn.fp32_precision
        with _plain:
            assert (matmul.fp32_precision, onednn.fp32_precision) == ("ieee", "ieee")
        assert (matmul.fp32_precision, onednn.fp32_precision) == settings
    finally:
        torch.set_float32_matmul_precision(before[0])
        matmul.fp32_precision, onednn.fp32_precision = before[1:]


def test_a_change_that_fails_midway_is_undone() -> None:
    undone = []

    def first(undo: Undo) -> None:
        undo.extend((lambda: undone.append(1), lambda: undone.append(2)))

    def second(undo: Undo) -> None:
        undo.append(lambda: undone.append(3))
        raise RuntimeError("second")

    settings = _Settings(first, second)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="second"), settings:
            pass
    assert undone == [3, 2, 1, 3, 2, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_within_a_call_starts_anew() -> None:
    changed = []
    settings = _Settings(lambda undo: changed.append(1))
    with settings:
        child = os.fork()
        if not child:
            with settings:
                os._exit(len(changed))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert changed == [1]


def test_low_matmul_precision_does_not_leak_in_or_out() -> None:
    seen = []

    class Watches(ReferenceBackend):
        name = "watches"

        def forward(self, *arguments: Any, **keywords: Any) -> Forwarded:
            seen.append((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))
            return super().forward(*arguments, **keywords)

        def backward(self, *arguments: Any) -> Gradients:
            seen.append((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))
            return super().backward(*arguments)

    example = random_example(9, vocab=43, hidden_size=8)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with installed(Watches(), alone=True), torch.autocast("cpu", dtype=torch.bfloat16):
            example.run()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [("highest", False)] * 2


@pytest.mark.parametrize("place", ["mkldnn", "mkldnn.matmul", "cuda.matmul"])
def test_the_newer_precision_settings_do_not_leak_in_or_out(place: str) -> None:
    """Beside them torch.get_float32_matmul_precision raises."""
    seen = []

    class Watches(ReferenceBackend):
        name = "watches"

        def forward(self, *arguments: Any, **keywords: Any) -> Forwarded:
            seen.append(backends.mkldnn.matmul.fp32_precision)
            return super().forward(*arguments, **keywords)

    backends: Any = torch.backends
    for own in (backends.mkldnn.matmul, backends.cuda.matmul):  # as torch starts, whatever tests ran before
        own.fp32_precision = "none"
    setting = operator.attrgetter(place)(backends)
    before = setting.fp32_precision
    setting.fp32_precision = "tf32"
    try:
        with installed(Watches(), alone=True):
            random_example(9, vocab=43, hidden_size=8).run()
        assert setting.fp32_precision == "tf32"
    finally:
        setting.fp32_precision = before
    assert seen[0] in ("ieee", "none")
    assert torch.get_float32_matmul_precision() == "highest"


def test_precision_is_restored_when_the_backend_raises() -> None:
    class Fails(ReferenceBackend):
        name = "fails"

        def forward(self, *arguments: Any, **keywords: Any) -> Forwarded:
            raise RuntimeError("out of luck")

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with installed(Fails(), alone=True), pytest.raises(RuntimeError, match="out of luck"):
            random_example(9, vocab=43, hidden_size=8).score()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
