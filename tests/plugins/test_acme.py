"""The example plugins of a third party hold the contracts, as they would show it in tests of their own."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from acme_logprobs import AcmeModel

from logitless.testing.adapter import AdapterConformance
from logitless.testing.conformance import BackendConformance


class TestAcmeBackend(BackendConformance):
    backend = "acme"
    dtypes = (torch.float64, torch.float32)
    refuses = ("bias", "softcap", "lora", "grad_buffer", "policy_loss", "unvalidated")


class TestAcmeAdapter(AdapterConformance):
    adapter = "acme"
    layouts = ("bshd",)

    def make_model(self, dtype: torch.dtype) -> AcmeModel:
        return AcmeModel(hidden_size=16, outputs=101).to(dtype)

    def logits(self, model: AcmeModel, input_ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids.unsqueeze(0)).squeeze(0)

    def make_value_model(self, dtype: torch.dtype) -> AcmeModel:
        return AcmeModel(hidden_size=16, outputs=1).to(dtype)

    def values(self, model: AcmeModel, input_ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids.unsqueeze(0)).flatten()

    def checkpoint(self, folder: Path) -> str:
        (folder / "acme.json").write_text(json.dumps({"outputs": 101}))
        return str(folder)
