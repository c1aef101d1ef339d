"""The contract of a backend, as core's testing kit states it: on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

import pytest
import torch

from logitless.testing.conformance import BackendConformance

HAS_GPU = torch.cuda.is_available()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy says aloud what a GPU does silently
class TestTriton(BackendConformance):
    backend = "triton"
    device = "cuda" if HAS_GPU else "cpu"
    drawn = 20 if HAS_GPU else 3
    # Triton's interpreter computes bfloat16 products wrongly; the backend refuses them there.
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if HAS_GPU else (torch.float32, torch.float16)
