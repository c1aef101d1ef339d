"""Divergences of two heads: the contract, on the GPU if there is one, else in the interpreter; sharded vocabularies."""

from __future__ import annotations

import pytest
import torch

from logitless.testing.divergence import DivergenceConformance

HAS_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says aloud what a GPU does silently


class TestTritonDivergence(DivergenceConformance):
    backend = "triton"
    device = "cuda" if HAS_GPU else "cpu"
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if HAS_GPU else (torch.float32, torch.float16)
