"""The backends agree on one call, in a process where Triton's kernels run in its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from logitless.testing import random_example

options = {"bias": True, "softcap": 5.0, "vocab_size": 290, "lora": (2,), "per_token_temperature": True}
example = random_example(13, 300, 24, dtype=torch.float32, std=3.0, **options)
for asked in ({}, {"top_k": 7}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.8}, {"stats": ("sum_sq_probs", "mean_logit")}):
    triton, own = (example.run(backend=name, **asked) for name in ("triton", "torch"))
    pairs = [(triton.scores.log_probs, own.scores.log_probs), (triton.scores.entropy, own.scores.entropy)]
    pairs += [(x, own.gradients[name]) for name, x in triton.gradients.items()]
    pairs += [(x, own.scores.stats[name]) for name, x in (triton.scores.stats or {}).items()]
    assert len(pairs) == 7 + len(asked.get("stats", ())), len(pairs)
    for x, y in pairs:
        torch.testing.assert_close(x, y, rtol=1e-4, atol=4e-5)
print("agree")
"""


def test_on_one_call() -> None:
    pytest.importorskip("triton", reason="Triton is for Linux")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "agree\n", done.stderr
