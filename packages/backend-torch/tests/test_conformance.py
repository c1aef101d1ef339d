"""The contract of a backend, as core's testing kit states it."""

from __future__ import annotations

import torch

from logitless.testing.conformance import BackendConformance


class TestTorch(BackendConformance):
    backend = "torch"
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
