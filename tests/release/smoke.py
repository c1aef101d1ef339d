"""What every release must do where it was just installed; run by that venv's Python, away from the working tree.

    python -I smoke.py VERSIONS.json

VERSIONS.json holds each distribution's name and version. It imports them, scores with gradients, binds a tiny model,
packs a batch, and asks `logitless doctor`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import logitless
from logitless import reference


def check_versions(expected: dict[str, str]) -> None:
    for dist, version in expected.items():
        module = importlib.import_module(dist.replace("-", "_"))
        assert module.__version__ == importlib.metadata.version(dist) == version, dist
        assert module.__file__ is not None
        assert Path(module.__file__).is_relative_to(sys.prefix), f"{dist} comes from {module.__file__}"
        brought = {file.name for file in importlib.metadata.files(dist) or ()}
        assert {"LICENSE", "py.typed"} <= brought, f"{dist} lacks its papers"


def check_op() -> None:
    hidden, weight = (torch.randn(*shape, requires_grad=True) for shape in ((5, 4), (7, 4)))
    labels, grads = torch.tensor([0, 6, -100, 3, 3]), []
    for solve in (logitless.linear_log_probs, reference.linear_log_probs):
        out = solve(hidden, logitless.LMHead(weight), labels, temperature=0.7)
        grads.append(torch.autograd.grad((out.log_probs * 2 + out.entropy).sum(), (hidden, weight)))
    torch.testing.assert_close(*grads)


def check_model() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval()
    batch = logitless.PackedBatch.from_sequences([[1, 2, 3], [4, 5]])
    found = logitless.make_forward(model)(batch).log_probs
    expected = model(torch.tensor([[1, 2, 3]])).logits.log_softmax(-1)[0, [0, 1], [2, 3]]
    torch.testing.assert_close(found[:2], expected, rtol=1e-4, atol=1e-4)


def check_command(expected: dict[str, str]) -> None:
    command = Path(sys.executable).with_name("logitless")
    said = subprocess.run([command, "doctor", "--json"], capture_output=True, text=True, check=True).stdout
    report = json.loads(said)
    listed = {row["dist"]: row for kind in ("backends", "adapters", "commands") for row in report[kind]}
    assert all(row["ok"] for row in listed.values()), listed
    assert {dist: row["version"] for dist, row in listed.items()} == expected
    assert report["chosen"] == "torch"


if __name__ == "__main__":
    versions = json.loads(Path(sys.argv[1]).read_text())
    check_versions(versions)
    check_op()
    check_model()
    check_command(versions)
    print(f"{len(versions)} distributions import, score, bind and report: {versions}")
