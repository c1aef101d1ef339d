"""Without a GPU the kernels run in Triton's interpreter, which is chosen when Triton is imported."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # `full_logits`, a helper of these tests

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import_module("logitless_triton.policy")
    finally:
        del os.environ["TRITON_INTERPRET"]  # other packages' tests in this process are not to be served by it


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction

        if not isinstance(tl.sum, InterpretedFunction):
            pytest.skip("Triton was imported before its interpreter could be chosen")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
