from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import logitless
import logitless_hf
from logitless.errors import InvalidInputError
from logitless_hf import HFAdapter


def test_core_finds_the_adapter() -> None:
    statuses = {status.name: status for status in logitless.adapters()}
    assert statuses["hf"].ok, statuses["hf"].reason
    assert statuses["hf"].version == logitless_hf.__version__
    assert (HFAdapter().name, HFAdapter().protocol) == ("hf", logitless.PROTOCOL)


def test_supports(make_model: Any) -> None:
    adapter = HFAdapter()
    assert adapter.supports(make_model()) is None
    assert "get_output_embeddings" in str(adapter.supports(nn.Linear(2, 2)))
    assert "str" in str(adapter.supports("llama"))


def test_a_wrapper_is_told_what_to_hand_in(make_model: Any) -> None:
    told = str(HFAdapter().supports(nn.DataParallel(make_model())))
    assert told.startswith("DataParallel wraps a model; pass its .module. ")
    assert "DDP does not average the gradients" in told
    assert "pass its ._orig_mod" in str(HFAdapter().supports(torch.compile(nn.Linear(2, 2), backend="eager")))


def test_inspect(make_model: Any, tmp_path: Path) -> None:
    make_model("gemma2").save_pretrained(tmp_path)
    verdict = HFAdapter().inspect(str(tmp_path))
    assert verdict == {
        "model": "Gemma2ForCausalLM",
        "vocab_size": 101,
        "hidden_size": 32,
        "dtype": "float64",
        "bias": False,
        "scale": 1.0,
        "softcap": 5.0,
        "adapters": (),
        "reason": None,
        "values": False,
        "own_forward": False,
        "offset": None,
        "understood": True,
    }


def test_what_cannot_be_inspected_is_refused_with_its_reason(make_model: Any, tmp_path: Path) -> None:
    for path in (str(tmp_path / "nowhere"), "/nope", "org/name"):
        with pytest.raises(InvalidInputError, match=f"got {path}, which does not exist; .*no model hub"):
            HFAdapter().inspect(path)
    make_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 77}))
    with pytest.raises(InvalidInputError, match="--model: the weights in"):
        HFAdapter().inspect(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(InvalidInputError, match="the weights in .* cannot be read: .*; expected a folder"):
        HFAdapter().inspect(str(tmp_path))


def test_public_names() -> None:
    assert logitless_hf.__all__ == sorted(logitless_hf.__all__)
    assert all(hasattr(logitless_hf, name) for name in logitless_hf.__all__)
