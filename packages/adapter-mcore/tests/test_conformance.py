"""The contract of an adapter, as core's testing kit states it; each check on a rank of Megatron's of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
from megatron_cpu import alone, build_gpt, hf_config

from logitless.testing.adapter import AdapterConformance
from logitless_mcore import to_value_model


class TestMcore(AdapterConformance):
    adapter = "mcore"
    backend = "torch"
    dtypes = (torch.float32,)

    def around(self, check: Callable[[], None]) -> None:
        def on_rank() -> str | None:
            try:
                check()
            except pytest.skip.Exception as skipped:
                return str(skipped)
            return None

        reason = alone(on_rank)
        if reason is not None:
            pytest.skip(reason)

    def make_model(self, dtype: torch.dtype) -> Any:
        gpt = build_gpt(hf_config("llama", vocab_size=136), params_dtype=dtype)
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        return gpt

    def logits(self, model: Any, input_ids: Tensor) -> Tensor:
        return self.own(model, input_ids)

    def make_value_model(self, dtype: torch.dtype) -> Any:
        return to_value_model(self.make_model(dtype))

    def values(self, model: Any, input_ids: Tensor) -> Tensor:
        return self.own(model, input_ids).squeeze(-1)

    def own(self, model: Any, input_ids: Tensor) -> Tensor:
        row = input_ids.unsqueeze(0)
        mask = torch.ones(1, 1, len(input_ids), len(input_ids), dtype=torch.bool).triu(1)
        out = model(input_ids=row, position_ids=torch.arange(len(input_ids)).unsqueeze(0), attention_mask=mask)
        return out.squeeze(0)

    def checkpoint(self, folder: Path) -> str:
        (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
        return str(folder)
