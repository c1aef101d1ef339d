"""Checkpoints that are damaged, ambiguous or quantised: told by file and name, and never loaded wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cpu import alone, build_gpt, hf_model
from safetensors.torch import load_file, save_file

from logitless.errors import InvalidInputError
from logitless_mcore.adapter import McoreAdapter
from logitless_mcore.hf_source import INDEX, open_source
from logitless_mcore.weights import load_hf_weights, save_hf_weights

FILE = "model.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(3), "b": torch.arange(4.0)}, tmp_path / FILE)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def test_a_folder_is_read_by_its_files_or_its_index(folder: Path) -> None:
    save_file({"c": torch.zeros(1)}, folder / "other.safetensors")
    source = open_source(folder)
    assert sorted(source) == ["a", "b", "c"]
    assert source.read("b").tolist() == [0, 1, 2, 3]
    assert source.config == {"model_type": "llama"}
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": FILE}}))
    assert list(open_source(folder)) == ["a"]


@pytest.mark.parametrize("content", [b"", b"{", POINTER, None], ids=["empty", "begun", "pointer", "half"])
@pytest.mark.parametrize("name", [FILE, INDEX, "config.json"])
def test_a_file_that_cannot_be_read_is_named(name: str, content: bytes | None, folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": FILE, "b": FILE}}))
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(InvalidInputError, match=rf"source: {folder / name} cannot be read \(.*git lfs pull"):
        open_source(folder).read("a")
    (folder / INDEX).unlink()
    if name == FILE:
        with pytest.raises(InvalidInputError, match=rf"source: {folder / name} cannot be read"):
            open_source(folder)
    if name == "config.json":
        with pytest.raises(InvalidInputError, match=rf"{folder / name} cannot be read"):
            McoreAdapter().inspect(str(folder))


def test_a_configuration_that_is_no_object(folder: Path) -> None:
    (folder / "config.json").write_text("[]")
    with pytest.raises(InvalidInputError, match="it holds a list, not an object"):
        open_source(folder)


def test_a_tensor_that_the_index_alone_has(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": FILE, "d": FILE}}))
    with pytest.raises(InvalidInputError, match=rf"source: {folder / FILE} cannot be read \(.*tensor d"):
        open_source(folder).read("d")


def test_a_tensor_in_two_files_without_an_index(folder: Path) -> None:
    """The last file's was taken: a stale one beside the checkpoint."""
    save_file({"b": torch.zeros(4)}, folder / "stale.safetensors")
    with pytest.raises(InvalidInputError, match=rf"{FILE} and stale.safetensors both hold b, and no {INDEX} tells"):
        open_source(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_quantised_tensor(dtype: torch.dtype) -> None:
    """Its numbers without their scales would be taken for weights."""

    def run() -> str:
        reference: Any = hf_model()
        name = "model.layers.1.mlp.down_proj.weight"
        source = {**reference.state_dict(), name: reference.state_dict()[name].to(dtype)}
        with pytest.raises(InvalidInputError) as caught:
            load_hf_weights(build_gpt(reference.config), source)
        return str(caught.value)

    said = alone(run)
    assert "model.layers.1.mlp.down_proj.weight" in said
    assert f"is {dtype}, expected float32" in said


def test_a_checkpoint_is_not_saved_beside_one_that_would_be_loaded_in_its_place(tmp_path: Path) -> None:
    """transformers takes model.safetensors where there is one, whatever the index says: the old weights."""
    reference: Any = hf_model()
    reference.save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}

    def run() -> str:
        with pytest.raises(InvalidInputError) as caught:
            save_hf_weights(build_gpt(reference.config), tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == names
        (tmp_path / FILE).unlink()
        save_hf_weights(build_gpt(reference.config), tmp_path)
        return str(caught.value)

    assert f"folder: {tmp_path} holds model.safetensors, which transformers would load" in alone(run)
    assert len(load_file(tmp_path / "model-00001-00001.safetensors")) == len(reference.state_dict())
