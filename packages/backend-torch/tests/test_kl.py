"""Divergences of two heads: the contract, finite differences, properties, memory, sharded vocabularies."""

from __future__ import annotations

import torch

from logitless.testing.divergence import DivergenceConformance


class TestTorchDivergence(DivergenceConformance):
    backend = "torch"
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
