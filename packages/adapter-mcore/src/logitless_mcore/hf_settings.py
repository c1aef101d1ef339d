"""Whether a Megatron model computes what a Hugging Face configuration says: weights that fit can still be wrong there.

A rotary base, an epsilon or a sliding window leaves no trace in names and shapes; each is compared by value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from logitless.errors import InvalidInputError, UnsupportedError
from logitless_mcore.experts import compared, layers_with_experts

__all__ = ["FAMILIES", "check_settings"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen2_5_vl")

# Hugging Face's name, Megatron's.
SAME = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "rms_norm_eps": "layernorm_epsilon",
}
EXPECTED = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "layernorm_zero_centered_gamma": False,
    "rotary_interleaved": False,
    "multi_latent_attention": False,
}
ROPE = ("default", "linear", "llama3", "mrope")  # the last: default frequencies over three axes
INSTEAD = "pass check_config=False if you know that it does not matter"


def check_settings(model: Any, told: dict[str, Any], where: str) -> None:
    """Compare a GPTModel with a Hugging Face configuration.

    Args:
        model: GPTModel, unwrapped, any pipeline stage.
        told: what config.json holds.
        where: what messages call the checkpoint.

    Raises:
        UnsupportedError: the family, or its rotary embedding, is not one that is understood.
        InvalidInputError: the model computes something else; all differences are listed.
    """
    family = told.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedError(f"{where} is of the family {family!r}, expected one of {', '.join(FAMILIES)}")
    told = {**told, **told.get("text_config", {})}  # of the language model within one that takes images
    differences = [
        f"{name}: {found!r}, expected {wanted!r}"
        for name, found, wanted in _compared(model, told)
        if not (math.isclose(found, wanted) if isinstance(wanted, float) and found is not None else found == wanted)
    ]
    differences += _rotary_difference(model, told)
    if differences:
        raise InvalidInputError(f"model: not what {where} was trained as ({'; '.join(differences)}); {INSTEAD}")


def _compared(model: Any, told: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Megatron's name, what the model has, and what it must be."""
    config = model.config
    experts = layers_with_experts(told) if told["model_type"] == "qwen3_moe" else []
    if experts:
        yield from compared(config, told)
    for name, own in SAME.items():
        if told.get(name) is not None and not (name == "intermediate_size" and experts and all(experts)):
            yield own, getattr(config, own), told[name]
    head_size = told.get("head_dim") or told["hidden_size"] // told["num_attention_heads"]
    yield "kv_channels", config.kv_channels, head_size
    for own, wanted in EXPECTED.items():
        yield own, getattr(config, own, wanted), wanted
    yield "activation_func", config.activation_func is functional.silu, told.get("hidden_act", "silu") == "silu"
    yield "softmax_scale", config.softmax_scale or head_size**-0.5, head_size**-0.5
    yield "window_size by layer", _own_windows(config), _told_windows(told)


def _told_windows(told: dict[str, Any]) -> list[tuple[int, int] | None]:
    layers, window = told["num_hidden_layers"], told.get("sliding_window")
    if window is None or not told.get("use_sliding_window", True):
        return [None] * layers
    kinds = told.get("layer_types")
    if kinds is None:
        first = told.get("max_window_layers", 0) if "use_sliding_window" in told else 0
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    # Hugging Face counts the token itself, Megatron only those before it.
    return [(window - 1, 0) if kind == "sliding_attention" else None for kind in kinds]


def _own_windows(config: Any) -> list[tuple[int, int] | None]:
    from megatron.core.transformer.utils import is_layer_window_attention

    numbers = range(1, config.num_layers + 1)
    windowed = [is_layer_window_attention(config.window_size, config.window_attn_skip_freq, n) for n in numbers]
    return [tuple(config.window_size) if x else None for x in windowed]


# --- rotary embedding ---------------------------------------------------------------------------------------------


def _rotary_difference(model: Any, told: dict[str, Any]) -> list[str]:
    kind, section = getattr(model, "position_embedding_type", None), _told_rope(told).get("mrope_section")
    if kind != ("mrope" if section else "rope"):
        return [f"position_embedding_type: {kind!r}, expected {'mrope' if section else 'rope'!r}"]
    if section and list(model.mrope_section) != list(section):
        return [f"mrope_section: {model.mrope_section}, expected {list(section)}"]
    wanted = _told_frequencies(told)
    rotary = model.rotary_pos_emb
    found = rotary.inv_freq.float().cpu() / (rotary.seq_len_interpolation_factor or 1.0)
    if found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-4, atol=0):
        return []
    return [
        f"rotary frequencies: {found.shape[0]} from 1 down to {found[-1]:.4g}, expected {wanted.shape[0]} down to "
        f"{wanted[-1]:.4g} (rotary_base, rotary_percent, rope_scaling and rope_scaling_factor of GPTModel)"
    ]


def _told_rope(told: dict[str, Any]) -> dict[str, Any]:
    return told.get("rope_parameters") or told.get("rope_scaling") or {}  # transformers 5, transformers 4


def _told_frequencies(told: dict[str, Any]) -> Tensor:
    """[rotary head size / 2] fp32, in radians a token."""
    rope = _told_rope(told)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE:
        raise UnsupportedError(f"rope_type: got {kind!r}, expected one of {', '.join(ROPE)}; {INSTEAD}")
    base = rope.get("rope_theta", told.get("rope_theta", 10000.0))
    size = told.get("head_dim") or told["hidden_size"] // told["num_attention_heads"]
    size = int(size * rope.get("partial_rotary_factor", told.get("partial_rotary_factor", 1.0)))
    frequency: Tensor = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if kind == "linear":
        frequency = frequency / rope["factor"]
    return _llama3(frequency, rope) if kind == "llama3" else frequency


def _llama3(frequency: Tensor, rope: dict[str, Any]) -> Tensor:
    """Llama 3.1's stretching: long waves by the whole factor, short ones not at all, a ramp between."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    stretched: Tensor = frequency * (smooth + (1 - smooth) / factor)
    return stretched
