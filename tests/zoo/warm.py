"""Loaded by the server that each class's process is forked from: what the first class would load, all find loaded.

Nothing here runs a backward pass; autograd's threads do not survive a fork.
"""

from __future__ import annotations

import warnings

from transformers import LlamaForCausalLM
from verdict import tiny_model

import logitless_hf

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    logitless_hf.bind(tiny_model(LlamaForCausalLM))
