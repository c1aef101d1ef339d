"""Megatron-Core models that return log-probabilities and entropies, and never hold their logits.

Nothing of Megatron is imported before it is needed: that takes seconds, and where a part of it is broken it fails.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logitless_mcore.adapter import McoreAdapter
    from logitless_mcore.bound import make_forward
    from logitless_mcore.forwards import (
        fused_forward_model_gen,
        fused_gptmodel_forward_no_padding,
        gptmodel_forward_no_padding,
        model_forward_gen,
    )
    from logitless_mcore.head import set_vocab_size
    from logitless_mcore.outputs import CausalLMOutputForPPO
    from logitless_mcore.packing import (
        postprocess_bshd,
        postprocess_bshd_no_padding,
        postprocess_packed_seqs,
        postprocess_thd_no_padding,
        preprocess_bshd,
        preprocess_bshd_no_padding,
        preprocess_packed_seqs,
        preprocess_thd_no_padding,
    )
    from logitless_mcore.qwen2_5_vl import Qwen2_5_VL, build_qwen2_5_vl, qwen2_5_vl_config
    from logitless_mcore.registry import (
        get_mcore_forward_fn,
        get_mcore_forward_fused_fn,
        get_mcore_forward_no_padding_fn,
    )
    from logitless_mcore.spec import keep_rotary_on_device, layer_spec, prediction_spec
    from logitless_mcore.value_head import to_value_model
    from logitless_mcore.weights import hf_weights, load_hf_weights, save_hf_weights

__version__ = version("logitless-mcore")

__all__ = [
    "CausalLMOutputForPPO",
    "McoreAdapter",
    "Qwen2_5_VL",
    "__version__",
    "build_qwen2_5_vl",
    "fused_forward_model_gen",
    "fused_gptmodel_forward_no_padding",
    "get_mcore_forward_fn",
    "get_mcore_forward_fused_fn",
    "get_mcore_forward_no_padding_fn",
    "gptmodel_forward_no_padding",
    "hf_weights",
    "keep_rotary_on_device",
    "layer_spec",
    "load_hf_weights",
    "make_forward",
    "model_forward_gen",
    "postprocess_bshd",
    "postprocess_bshd_no_padding",
    "postprocess_packed_seqs",
    "postprocess_thd_no_padding",
    "prediction_spec",
    "preprocess_bshd",
    "preprocess_bshd_no_padding",
    "preprocess_packed_seqs",
    "preprocess_thd_no_padding",
    "qwen2_5_vl_config",
    "save_hf_weights",
    "set_vocab_size",
    "to_value_model",
]

_HOME = {
    "CausalLMOutputForPPO": "outputs",
    "McoreAdapter": "adapter",
    "Qwen2_5_VL": "qwen2_5_vl",
    "build_qwen2_5_vl": "qwen2_5_vl",
    "fused_forward_model_gen": "forwards",
    "fused_gptmodel_forward_no_padding": "forwards",
    "get_mcore_forward_fn": "registry",
    "get_mcore_forward_fused_fn": "registry",
    "get_mcore_forward_no_padding_fn": "registry",
    "gptmodel_forward_no_padding": "forwards",
    "hf_weights": "weights",
    "keep_rotary_on_device": "spec",
    "layer_spec": "spec",
    "load_hf_weights": "weights",
    "make_forward": "bound",
    "model_forward_gen": "forwards",
    "postprocess_bshd": "packing",
    "postprocess_bshd_no_padding": "packing",
    "postprocess_packed_seqs": "packing",
    "postprocess_thd_no_padding": "packing",
    "prediction_spec": "spec",
    "preprocess_bshd": "packing",
    "preprocess_bshd_no_padding": "packing",
    "preprocess_packed_seqs": "packing",
    "preprocess_thd_no_padding": "packing",
    "qwen2_5_vl_config": "qwen2_5_vl",
    "save_hf_weights": "weights",
    "set_vocab_size": "head",
    "to_value_model": "value_head",
}
_WITHOUT_MEGATRON = {"adapter", "outputs"}


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if module not in _WITHOUT_MEGATRON:
        from logitless_mcore.spec import require_megatron

        require_megatron()  # whose errors say what to install
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
