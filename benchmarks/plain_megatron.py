"""Settings of Megatron-Core that all benchmarks' models share: Llama's kind of layer, without what needs Apex."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["PLAIN"]

PLAIN: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
"""Keywords of TransformerConfig."""
