"""Tiny models of any family: its default config, shrunk by the names of its fields.

A rule is a pattern of names and the largest value that such a field keeps. What no rule can know is in `OVERRIDES`.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

__all__ = ["VOCAB", "tiny_config", "tiny_model"]

VOCAB, HEAD_DIM, HEADS, LAYERS = 151, 16, 4, 2
HIDDEN = HEADS * HEAD_DIM
FIRST_SPECIAL = 5  # token ids from here on are text; those of images and the like are counted from the vocabulary's end

# The first rule that matches a field's whole name counts; a field of a smaller value keeps it.
RULES: list[tuple[str, int]] = [
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r".*(head_dim|head_dims|headdim)|d_kv|kv_channels|d_head|mamba_d_head|attention_head_dim", HEAD_DIM),
    (r".*(key_value_heads|kv_heads|kv_n_heads|num_query_groups)", 2),
    (r".*(num|n|attention|mamba|index|indexer|key|value|query|linear_num|d)_heads|n_head|num_attention_groups", HEADS),
    (r"num_heads", HEADS),
    (r".*vocab_size|.*_group_vocab|num_embeddings|.*vocab_size_per_layer_input", VOCAB),
    (r".*layers|depth|n_layer|num_blocks|.*num_layers", LAYERS),
    (r".*(intermediate_size|ffn_dim|ff_dim|mlp_dim|ffn_hidden_size)(_mlp)?|d_ff|n_inner|dff|dim_ff|d_inner", HIDDEN),
    (r"rotary_dim", 8),
    (r"(mamba_)?d_ssm|lru_width|word_embed_proj_dim|attention_hidden_size|share_expert_dim", HIDDEN),
    (
        r".*(hidden_size|hidden_sizes|embed_dim|emb_dim|hidden_dim|projection_dim|codebook_dim|condition_dim|embedding_size|embedding_dim)",
        HIDDEN,
    ),
    (r"d_model|n_embd|.*hidden_size_per_layer_input|.*_embed_dims?|out_dim|output_dim", HIDDEN),
    (r"(n_group|topk_group|num_expert_group|n_shared_experts|.*num_shared_experts|(mamba_)?n_?groups)", 1),
    (r".*(experts_per_tok|experts_per_token|moe_topk|moe_k|top_k_experts|moe_top_k)", 2),
    (r".*(num_experts|local_experts|routed_experts|expert_num|num_experts_total)", 4),
    (r".*(lora_rank|_rank|lowrank)", 8),
    (r".*(max_position_embeddings|n_positions|n_ctx|model_max_length|max_seq_len|context_length|seq_len)", 64),
    (r".*(source_positions|target_positions|position_embeddings|decoder_position_embeddings)", 64),
    (r".*(sliding_window|attention_window|attention_window_size|sliding_window_size|attention_chunk_size)", 16),
    (r".*(chunk_size|block_size)|local_attention|window_size", 8),
    (r".*(state_size|d_state)", 8),
    (r"image_size|crop_size", 64),
    (r".*channels", 64),
]
KEPT = ("num_channels", "in_channels", "audio_channels", "input_channels", "max_window_layers")
LAYER_LISTS = re.compile(r".*(layers|layer|layer_ids|indexes|idxs|indices)$")  # of layers, by their index
IDS = re.compile(r".*(_token_ids?|_token_index|_id|_ids|_index)$")
# What scales, caps or shifts logits is moved off the value that does nothing, or that is usual.
PERTURBED: list[tuple[str, float]] = [
    (r"(final_logit|logits_|output_logit_|logits).*(softcapping|soft_cap|softcap)", 3.0),
    (r"logit_scale", 0.3),
    (r"logits_scaling", 3.0),
    (r"lm_head_multiplier|output_multiplier", 0.7),
    (r"logits_mup_width_multiplier", 1.5),
]
SWITCHED_ON = re.compile(r"lm_head_bias|head_bias|decoder_bias|is_decoder")
BASE_FIELDS = frozenset(PretrainedConfig().to_dict())

# By config class: what replaces the rules' choice, and what the default config needs to be made at all.
OVERRIDES: dict[str, dict[str, Any]] = {
    "BambaConfig": {"mamba_n_heads": 8},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 140, "IMGIMGAZ": 141, "IMGIMGBZ": 142}},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "DbrxAttentionConfig": {"rope_theta": 1e4, "clip_qkv": 8.0},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "DoryConfig": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1, "num_hidden_layers": 4},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Emu3Config": {"vocabulary_map": {"<image>": 140}},
    "Ernie4_5_VLMoeTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [3, 3, 2]},
        "moe_intermediate_size": [HIDDEN, HIDDEN],
    },
    "FunAsrNanoAdaptorConfig": {"intermediate_size": HIDDEN // 4},
    "GemmaConfig": {"num_key_value_heads": 1},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "Gemma4TextConfig": {"per_layer_config": {}},
    "Gemma4UnifiedTextConfig": {"per_layer_config": {}},
    "Granite4VisionConfig": {
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0],
        "downsample_rate": "1/2",
    },
    "GraniteMoeHybridConfig": {"mamba_n_heads": 8},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Mamba2Config": {"num_heads": 8},
    "MimiConfig": {"upsample_groups": HIDDEN},
    "Mistral4Config": {"head_dim": 2 * HEAD_DIM},
    "MuseSparkAudioConfig": {"num_hidden_layers": 4, "hidden_sizes": [HIDDEN] * 4, "depths": [1] * 4},
    "Zamba2Config": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "hybrid_layer_ids": [1],
        "attention_head_dim": 2 * HEAD_DIM,
        "attention_hidden_size": 2 * HIDDEN,
        "n_mamba_heads": 8,
    },
    "ZambaConfig": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_head_dim": 2 * HEAD_DIM,
        "attention_hidden_size": 2 * HIDDEN,
    },
    "Step3p7TextConfig": {"sliding_window": 16},
    "NemotronConfig": {"num_key_value_heads": HEADS},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma4AssistantConfig": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "Gemma4UnifiedAssistantConfig": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
}


@cache
def _has_sections(config_class: type) -> bool:
    """Whether the family splits its rotary dimensions into those of time, height and width."""
    folder = Path(inspect.getfile(config_class)).parent
    return any("mrope_section" in path.read_text(encoding="utf-8") for path in folder.glob("modeling_*.py"))


def _shrunk(name: str, value: Any) -> Any:
    for pattern, largest in RULES:
        if re.fullmatch(pattern, name):
            return min(value, largest)
    return value


class _Shrinker:
    """One model's config; sub-configs share the numbering of special tokens."""

    def __init__(self) -> None:
        self.special: dict[int, int] = {}

    def token_id(self, value: int) -> int:
        if value < FIRST_SPECIAL:
            return value
        return self.special.setdefault(value, VOCAB - 1 - len(self.special))

    def field(self, name: str, value: Any, config: PretrainedConfig) -> Any:
        if isinstance(value, PretrainedConfig):
            return self.config(value)
        for pattern, moved in PERTURBED:
            if re.fullmatch(pattern, name) and (value is None or isinstance(value, (int, float))):
                return moved
        if value is False and SWITCHED_ON.fullmatch(name):
            return True
        if isinstance(value, bool) or name in KEPT:
            return value
        if name == "head_dim" and value is None:
            return HEAD_DIM
        if name.startswith("rope_") and isinstance(value, dict):
            return self.rope(value, _has_sections(type(config)))
        if isinstance(value, int):
            if IDS.match(name):
                return self.token_id(value)
            if re.search(r"key_value_heads|kv_heads", name) and value == vars(config).get("num_attention_heads"):
                return HEADS
            return _shrunk(name, value)
        if isinstance(value, (list, tuple)) and len(value) == vars(config).get("num_hidden_layers"):
            return value  # an entry for each layer: the config makes it anew
        if isinstance(value, (list, tuple)) and LAYER_LISTS.match(name) and all(type(item) is int for item in value):
            return type(value)(min(item, LAYERS - 1) for item in value)
        if isinstance(value, (list, tuple)) and IDS.match(name) and all(type(item) is int for item in value):
            return type(value)(self.token_id(item) for item in value)
        return value

    def rope(self, rope: dict[str, Any], sections: bool) -> dict[str, Any]:
        if all(isinstance(value, dict) or value is None for value in rope.values()):
            return {name: value and self.rope(value, sections) for name, value in rope.items()}
        out = dict(rope)
        half = int(HEAD_DIM * (rope.get("partial_rotary_factor") or 1.0)) // 2
        if sections:
            section = rope.get("mrope_section") or [16, 24, 24]
            rest = [max(1, half * part // sum(section)) for part in section[1:]]
            out["mrope_section"] = [half - sum(rest), *rest]
        for name in ("short_factor", "long_factor"):
            if isinstance(rope.get(name), list):
                out[name] = rope[name][:half]
        return out

    def config(self, config: PretrainedConfig, changes: dict[str, Any] | None = None) -> PretrainedConfig:
        changed = {}
        for name, value in vars(config).items():
            if name.startswith("_") or (name in BASE_FIELDS and not IDS.match(name)):
                continue
            new = self.field(name, value, config)
            if new is not value and (isinstance(new, PretrainedConfig) or new != value):
                changed[name] = new
        changed |= OVERRIDES.get(type(config).__name__, {}) | (changes or {})
        return type(config)(**changed)


def tiny_config(model_class: Any, **changes: Any) -> PretrainedConfig:
    """The default config of the model's family at a tiny size."""
    config_class = model_class.config_class
    config = _Shrinker().config(config_class(**DEFAULTS.get(config_class.__name__, {})), changes)
    _own_experts(config)
    return config


def _own_experts(config: PretrainedConfig) -> None:
    """Experts by the family's own loop: the grouped product takes no float64."""
    config._experts_implementation = "eager"
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            _own_experts(value)


def tiny_model(model_class: Any, dtype: torch.dtype = torch.float64) -> nn.Module:
    """In eval mode; vectors, scalars and what lies beside the head are perturbed, and the head is scaled by 20."""
    torch.manual_seed(0)
    model: Any = model_class(tiny_config(model_class)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2 and parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
        head = model.get_output_embeddings()
        if isinstance(head, nn.Module):
            for module in model.modules():
                if any(child is head for child in module.children()):
                    for buffer in module.buffers(recurse=False):
                        if buffer.is_floating_point():
                            buffer.add_(torch.randn_like(buffer))
            for parameter in head.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(20)
    return model
