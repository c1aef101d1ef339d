"""The process's settings of precision are plain while a call runs, and then as they were."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest
import torch

from logitless._arithmetic import _products, _Settings, _sums


def test_short_sums_are_off_and_put_back() -> None:
    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(matmul, name) for name in names]
    try:
        for allowed in (True, False):
            for name in names:
                setattr(matmul, name, allowed)
            with _sums:
                assert not any(getattr(matmul, name) for name in names)
            assert [getattr(matmul, name) for name in names] == [allowed, allowed]
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)


def test_products_are_plain_until_the_last_call_ends() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with _products:
            with _products:
                assert torch.get_float32_matmul_precision() == "highest"
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_change_that_fails_midway_is_undone() -> None:
    undone = []

    def change(undo: ExitStack) -> None:
        undo.callback(undone.append, "first")
        raise RuntimeError("second")

    settings = _Settings(change)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="second"), settings:
            pass
    assert undone == ["first", "first"]


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
