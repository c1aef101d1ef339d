"""The contract of an adapter, as core's testing kit states it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForTokenClassification

from logitless.testing.adapter import AdapterConformance

SIZES = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


class TestHF(AdapterConformance):
    adapter = "hf"
    backend = "torch"

    @pytest.fixture(autouse=True)
    def _tiny(self, make_model: Any) -> None:
        self.tiny = make_model

    def make_model(self, dtype: torch.dtype) -> Any:
        return self.tiny("llama", dtype)

    def logits(self, model: Any, input_ids: Tensor) -> Tensor:
        return model(input_ids=input_ids.unsqueeze(0), use_cache=False).logits.squeeze(0)

    def make_value_model(self, dtype: torch.dtype) -> Any:
        config = AutoConfig.for_model("llama", **SIZES, num_attention_heads=4, num_key_value_heads=2, num_labels=1)
        return AutoModelForTokenClassification.from_config(config).to(dtype).eval()

    def values(self, model: Any, input_ids: Tensor) -> Tensor:
        return model(input_ids=input_ids.unsqueeze(0)).logits.squeeze(0).squeeze(-1)

    def checkpoint(self, folder: Path) -> str:
        self.make_model(torch.float32).save_pretrained(folder)
        return str(folder)
