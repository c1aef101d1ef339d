"""Forwards by architecture, and a refusal by name for those that are not known."""

from __future__ import annotations

import functools
from typing import Any

import megatron_cpu  # noqa: F401  skips these where Megatron is absent
import pytest

from logitless.errors import InputTypeError, UnsupportedError
from logitless_mcore import forwards
from logitless_mcore.registry import (
    get_mcore_forward_fn,
    get_mcore_forward_fused_fn,
    get_mcore_forward_no_padding_fn,
)

ALL = [get_mcore_forward_fn, get_mcore_forward_fused_fn, get_mcore_forward_no_padding_fn]
TEXT = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2ForTokenClassification",
]
IMAGES = "Qwen2_5_VLForConditionalGeneration"


class Config:
    def __init__(self, *architectures: Any) -> None:
        self.architectures = list(architectures)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both factories give back what they were asked for."""
    monkeypatch.setattr(forwards, "model_forward_gen", lambda images: ("padded", images))
    monkeypatch.setattr(forwards, "fused_forward_model_gen", lambda images: ("fused", images))


@pytest.mark.parametrize("name", TEXT)
@pytest.mark.usefixtures("made")
def test_models_of_text(name: str) -> None:
    assert get_mcore_forward_fn(Config(name, "Other")) == ("padded", False)
    assert get_mcore_forward_fused_fn(Config(name)) == ("fused", False)
    assert get_mcore_forward_no_padding_fn(Config(name)) is forwards.gptmodel_forward_no_padding


@pytest.mark.usefixtures("made")
def test_models_of_images() -> None:
    assert get_mcore_forward_fn(Config(IMAGES)) == ("padded", True)
    assert get_mcore_forward_fused_fn(Config(IMAGES)) == ("fused", True)
    forward = get_mcore_forward_no_padding_fn(Config(IMAGES))
    assert isinstance(forward, functools.partial)
    assert forward.func is forwards.gptmodel_forward_no_padding
    assert forward.keywords == {"vision_model": True}


@pytest.mark.parametrize("get", ALL)
@pytest.mark.parametrize("name", ["GemmaForCausalLM", "LlamaForCausalLMX", "ForCausalLM", "T5ForTokenClassification"])
def test_an_unknown_architecture_is_refused_by_name(get: Any, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"the architecture '{name}' is not known; expected one of LlamaForC"):
        get(Config(name))


@pytest.mark.parametrize("get", ALL)
@pytest.mark.parametrize("config", [Config(), Config(None), object(), {"architectures": ["LlamaForCausalLM"]}, None])
def test_a_configuration_without_architectures(get: Any, config: Any) -> None:
    with pytest.raises(InputTypeError, match="hf_config: got .* with architectures="):
        get(config)
