"""Small cases with right values, made in float64 from the definition, not from this code."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from logitless.head import LMHead
from logitless.testing.example import Example, Results, _moved
from logitless.types import TokenLogProbs

__all__ = ["Case", "cases"]


def _tensor(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Case:
    """One case; `data` holds the fields of its line in op_cases.json."""

    id: str
    why: str
    data: dict[str, Any]

    def build(self, dtype: torch.dtype = torch.float64, device: str | torch.device = "cpu") -> Example:
        """The case's inputs, rounded to a dtype."""
        data = self.data
        temperature = data.get("temperature", 1.0)
        example = Example(
            hidden=_tensor(data["hidden"]),
            head=LMHead(
                _tensor(data["weight"]),
                bias=_tensor(data["bias"]) if "bias" in data else None,
                scale=data.get("scale", 1.0),
                softcap=data.get("softcap"),
                vocab_size=data.get("vocab_size"),
                lora=((_tensor(data["lora_u"]), _tensor(data["lora_b"])),) if "lora_u" in data else (),
            ),
            labels=torch.tensor(data["labels"]),
            grad_log_probs=_tensor(data["grad_log_probs"]),
            grad_entropy=_tensor(data["grad_entropy"]),
            temperature=_tensor(temperature) if isinstance(temperature, list) else temperature,
        )
        return _moved(example.to(dtype), device)

    @property
    def expected(self) -> Results:
        """Right values in float64, on the CPU, for inputs that were not rounded."""
        data = self.data
        names = {"hidden": "hidden", "weight": "weight", "bias": "bias", "lora_u": "lora_u0", "lora_b": "lora_b0"}
        return Results(
            TokenLogProbs(_tensor(data["log_probs"]), _tensor(data["entropy"])),
            {leaf: _tensor(data[f"d_{name}"]) for name, leaf in names.items() if f"d_{name}" in data},
        )


@functools.cache
def cases() -> tuple[Case, ...]:
    """All cases, in the order of the file."""
    lines = json.loads((files(__package__) / "op_cases.json").read_text(encoding="utf-8"))
    return tuple(Case(line["name"].replace(" ", "-"), line["why"], line) for line in lines)
