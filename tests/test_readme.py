"""The code of README and of docs/training-loop.md runs as it stands, one block after another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


BLOCKS = python_blocks(README)


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


def test_the_page_on_training_loops(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    engine = torch.rand(2, 5) - 2.0
    names |= {"torch": torch, "temperature": 0.7, "rewards": torch.tensor([1.0, 0.0]), "group": torch.tensor([0, 0])}
    names |= {"engine_log_probs": engine, "optimizer": torch.optim.SGD(names["model"].parameters(), 0.1)}
    before = names["model"].lm_head.weight.clone()
    for block in python_blocks((ROOT / "docs" / "training-loop.md").read_text()):
        exec(block, names)
    assert names["worst"] < 1e-5
    torch.testing.assert_close(names["fused_entropy"][names["scored"]], names["entropy"][names["scored"]])
    assert torch.equal(names["first_ratio"], torch.ones(9))
    assert names["out"].logits is None
    assert not torch.equal(names["model"].lm_head.weight, before)
    trained = names["batch"].unpack(names["trained"])[:, :-1]
    delta = (trained - engine[:, 1:])[names["completion_mask"][:, 1:] == 1]
    assert names["found"].tokens == 5
    assert names["found"].mean_abs_delta == pytest.approx(float(delta.abs().mean()))
    assert "share_outside" in capsys.readouterr().out
    assert float(names["loss"].detach()) == pytest.approx(0.0, abs=1e-6)  # two opposite advantages, ratios of 1
    assert names["model"].lm_head.weight.grad.abs().max() > 0


def test_commands_are_those_of_ci() -> None:
    commands = re.findall(r"```bash\n(.*?)\n```", README, re.DOTALL)
    ci = (ROOT / ".ci" / "run").read_text()
    assert len(commands) == 2
    assert commands[1] in ci
    assert commands[0] == f"{commands[1]} -s demo"
