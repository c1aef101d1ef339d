"""Hugging Face causal language models that return log-probabilities and entropies, and never hold their logits."""

from importlib.metadata import version

from logitless_hf.binding import bind, inspect_head, unbind
from logitless_hf.outputs import CausalLMOutputForPPO
from logitless_hf.scoring import HeadReport

__version__ = version("logitless-hf")

__all__ = [
    "CausalLMOutputForPPO",
    "HeadReport",
    "bind",
    "inspect_head",
    "unbind",
]
