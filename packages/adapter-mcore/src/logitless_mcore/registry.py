"""Which forward a model takes, by the architecture that its Hugging Face configuration names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from logitless.errors import InputTypeError, UnsupportedError

__all__ = ["get_mcore_forward_fn", "get_mcore_forward_fused_fn", "get_mcore_forward_no_padding_fn"]

# Whether the architecture takes images. Those with images are wrappers of a GPTModel that take `pixel_values` and the
# other keywords of `model_forward_gen(vision_model=True)`.
ARCHITECTURES = {
    "LlamaForCausalLM": False,
    "MistralForCausalLM": False,
    "Qwen2ForCausalLM": False,
    "Qwen3ForCausalLM": False,
    "Qwen3MoeForCausalLM": False,
    "Qwen2_5_VLForConditionalGeneration": True,
}
# Value models of the same trunks: transformers names them so.
VALUE_HEAD = "ForTokenClassification"


def _takes_images(hf_config: Any) -> bool:
    """Raises for an architecture that is not known."""
    named = getattr(hf_config, "architectures", None)
    if not isinstance(named, (list, tuple)) or not named or not isinstance(named[0], str):
        raise InputTypeError(
            f"hf_config: got {type(hf_config).__qualname__} with architectures={named!r}, expected a Hugging Face "
            "configuration that names its architecture, as that of a saved model does"
        )
    name = named[0]
    if name.endswith(VALUE_HEAD):
        name = name.removesuffix(VALUE_HEAD) + "ForCausalLM"
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"hf_config: the architecture {named[0]!r} is not known; expected one of {', '.join(ARCHITECTURES)}. Where "
            "Megatron's model takes no images, model_forward_gen(), gptmodel_forward_no_padding and "
            "fused_forward_model_gen() serve it without this look-up"
        )
    return ARCHITECTURES[name]


def get_mcore_forward_fn(hf_config: Any) -> Callable[..., Any]:
    """`model_forward_gen`'s forward over padded rows for this configuration's architecture.

    Raises:
        UnsupportedError: it is not known.
    """
    images = _takes_images(hf_config)
    from logitless_mcore.forwards import model_forward_gen

    return model_forward_gen(images)


def get_mcore_forward_no_padding_fn(hf_config: Any) -> Callable[..., Any]:
    """`gptmodel_forward_no_padding`, over nested tensors, as this configuration's architecture wants it.

    Raises:
        UnsupportedError: it is not known.
    """
    images = _takes_images(hf_config)
    from logitless_mcore.forwards import gptmodel_forward_no_padding

    return functools.partial(gptmodel_forward_no_padding, vision_model=True) if images else gptmodel_forward_no_padding


def get_mcore_forward_fused_fn(hf_config: Any) -> Callable[..., Any]:
    """`fused_forward_model_gen`'s forward for this configuration's architecture.

    Raises:
        UnsupportedError: it is not known.
    """
    images = _takes_images(hf_config)
    from logitless_mcore.forwards import fused_forward_model_gen

    return fused_forward_model_gen(images)
