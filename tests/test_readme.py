"""README's code runs as it stands, one block after another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def names() -> dict[str, Any]:
    """What README takes for granted."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    return {
        "model": LlamaForCausalLM(LlamaConfig(**sizes, **heads)),
        "input_ids": torch.randint(3, 50, (2, 5)),
        "attention_mask": mask,
        "mask": mask,
        "completion_mask": torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]),
        "advantages": torch.tensor([1.0, -1.0]),
        "hidden": torch.randn(2, 5, 16, requires_grad=True),
        "weight": torch.randn(50, 16, requires_grad=True),
        "labels": torch.randint(0, 50, (2, 5)),
    }


def test_training_loop(names: dict[str, Any]) -> None:
    exec(BLOCKS[0], names)
    out, old = names["out"], names["old"]
    assert torch.equal(out.log_probs, old)
    expected = -names["advantage"][names["weight"] > 0].mean()  # every ratio is 1
    torch.testing.assert_close(out.loss.detach(), expected)
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


def test_the_op_alone(names: dict[str, Any]) -> None:
    names["logitless"] = __import__("logitless")
    names["advantages"] = names["advantages"].unsqueeze(1)
    exec(BLOCKS[1], names)
    assert names["hidden"].grad.shape == names["hidden"].shape
    assert names["weight"].grad.shape == names["weight"].shape


def test_a_bound_model(names: dict[str, Any]) -> None:
    exec(BLOCKS[2], names)
    assert names["out"].log_probs.shape == names["out"].entropy.shape == (2, 5)


def test_every_block_is_run() -> None:
    assert len(BLOCKS) == 3


def test_commands_are_those_of_ci() -> None:
    commands = re.findall(r"```bash\n(.*?)\n```", README, re.DOTALL)
    ci = (Path(__file__).parents[1] / ".ci" / "run").read_text()
    assert len(commands) == 2
    assert commands[1] in ci
    assert commands[0] == f"{commands[1]} -s demo"
