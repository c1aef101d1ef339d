"""Hugging Face causal language models that return log-probabilities and entropies, and never hold their logits."""

from importlib.metadata import version

from logitless_hf.adapter import HFAdapter
from logitless_hf.binding import bind, inspect_head, unbind
from logitless_hf.outputs import CausalLMOutputForPPO
from logitless_hf.reference_names import (
    forward_base_model,
    forward_with_torch_backend,
    forward_with_triton_backend,
    patch_forward_with_backends,
)
from logitless_hf.scoring import HeadReport

__version__ = version("logitless-hf")

__all__ = [
    "CausalLMOutputForPPO",
    "HFAdapter",
    "HeadReport",
    "__version__",
    "bind",
    "forward_base_model",
    "forward_with_torch_backend",
    "forward_with_triton_backend",
    "inspect_head",
    "patch_forward_with_backends",
    "unbind",
]
