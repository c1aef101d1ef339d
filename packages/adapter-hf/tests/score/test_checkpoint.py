from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from logitless.errors import InvalidInputError
from logitless_hf.score import checkpoint as module
from logitless_hf.score.checkpoint import Checkpoint


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint, tmp_path / "copy")


def test_sizes_are_read_from_the_config(checkpoint: Path) -> None:
    loaded = Checkpoint(checkpoint)
    assert (loaded.vocab_size, loaded.max_positions) == (400, 96)


def test_the_dtype_is_the_checkpoints_unless_given(checkpoint: Path, copy: Path) -> None:
    cpu = torch.device("cpu")
    model = Checkpoint(checkpoint).load(None, cpu)
    assert model.dtype == torch.float32
    assert not model.training
    model.to(torch.bfloat16).save_pretrained(copy)
    assert Checkpoint(copy).load(None, cpu).dtype == torch.bfloat16
    assert Checkpoint(copy).load(torch.float32, cpu).dtype == torch.float32


def test_the_fingerprint_is_of_the_content(checkpoint: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Checkpoint(checkpoint).fingerprint()
    assert Checkpoint(copy).fingerprint() == before
    for name in ("README.md", "scores.jsonl.meta.json", "scores.parquet.mismatch.json"):
        (copy / name).write_text("not part of the model")
    assert Checkpoint(copy).fingerprint() == before
    weights = load_file(copy / "model.safetensors")
    save_file({name: value * 1.01 for name, value in weights.items()}, copy / "model.safetensors", {"format": "pt"})
    assert Checkpoint(copy).fingerprint() != before
    monkeypatch.setattr(module, "_SAMPLE_BYTES", 64)  # as for a file too big to be read whole
    assert Checkpoint(copy).fingerprint() != Checkpoint(checkpoint).fingerprint()


def test_a_path_that_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="does not exist; expected a local folder.*no model hub"):
        Checkpoint(Path("meta-llama/Llama-3.2-1B"))
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="is not a folder"):
        Checkpoint(tmp_path / "file")
    with pytest.raises(InvalidInputError, match="holds no config.json"):
        Checkpoint(tmp_path)


def test_unreadable_files_are_named(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(InvalidInputError, match="the weights in .* cannot be read"):
        Checkpoint(copy).load(None, torch.device("cpu"))
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidInputError, match="the tokenizer in .* cannot be read"):
        _ = Checkpoint(copy).tokenizer
    (copy / "config.json").write_text("{")
    with pytest.raises(InvalidInputError, match="the config in .* cannot be read"):
        Checkpoint(copy)


def test_a_tokenizer_that_is_not_there_is_none_and_not_made_up(checkpoint: Path, copy: Path) -> None:
    assert Checkpoint(checkpoint).tokenizer is not None
    (copy / "tokenizer.json").unlink()  # its config stays
    assert Checkpoint(copy).tokenizer is None


def test_weights_that_are_lacking_are_not_made_up(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInputError, match="lack 1 tensors of LlamaForCausalLM .*layers.1.mlp.up_proj.weight"):
        Checkpoint(copy).load(None, torch.device("cpu"))


def test_weights_of_another_shape_are_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(InvalidInputError, match="--model: the weights in"):
        Checkpoint(copy).load(None, torch.device("cpu"))
