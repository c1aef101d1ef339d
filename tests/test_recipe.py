"""The page that people copy: it learns, its first ratio is 1 to the bit, and it trains what the full logits train."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]
import grpo_minimal  # noqa: E402
import learning  # noqa: E402

SETTINGS = replace(learning.TINY, new_tokens=3)


def test_it_is_one_page() -> None:
    assert len(Path(grpo_minimal.__file__).read_text().splitlines()) < 200


@pytest.mark.parametrize(
    ("reply", "earned"), [(" 7", 1.0), (" 7\n", 1.0), ("8 or so", 0.8), (" 10", 0.4), ("12", 0.0), ("seven", 0.0)]
)
def test_reward(reply: str, earned: float) -> None:
    assert grpo_minimal.reward(reply, 7) == pytest.approx(earned)


def test_the_replies_tokens_are_scored_up_to_their_end() -> None:
    _, tokenizer = learning.tiny(0)
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    replies = torch.tensor([[9, end, pad], [end, pad, pad], [9, 8, 7]])
    model = SimpleNamespace(
        device="cpu", generate=lambda input_ids, **_: torch.cat([input_ids, replies.to(input_ids)], 1)
    )
    batch, texts = grpo_minimal.rollout(model, tokenizer, ["1 + 2 =", "3 =", "4 + 5 ="], SETTINGS)
    assert texts == ["5", "", "5 4 3"]
    assert batch.lengths == (6, 3, 7)
    scored = [labels[labels != -100].tolist() for labels in torch.split(batch.labels, batch.lengths)]
    assert scored == [[9, end], [end], [9, 8, 7]]


def trained(way: str, s: grpo_minimal.Settings) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Two plain SGD updates of one model with one batch of replies; what they report, and the weights after."""
    model, tokenizer = learning.tiny(0)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)  # else every distribution is nearly uniform
    reference = copy.deepcopy(model).requires_grad_(False)
    torch.manual_seed(0)
    batch, _ = grpo_minimal.rollout(model, tokenizer, ["1 + 2 =", "3 =", "4 + 5 = 9 =", "6 + 6 ="] * 2, s)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    advantages = torch.randn(8)
    forwards = [learning.WAYS[way](x) for x in (model, reference)]
    report = grpo_minimal.update(*forwards, batch, advantages, torch.optim.SGD(model.parameters(), 0.1), s)
    return report, {name: x.detach() for name, x in model.named_parameters()}


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("max_tokens", [16, 1024])
def test_it_trains_what_the_full_logits_train(beta: float, max_tokens: int) -> None:
    ours, weights = trained("logitless", replace(SETTINGS, beta=beta, max_tokens=max_tokens, updates=3))
    theirs, expected = trained("full logits", replace(SETTINGS, beta=beta, updates=3))
    assert ours.pop("first_ratio_error") == 0.0
    theirs.pop("first_ratio_error")
    assert ours == pytest.approx(theirs, abs=1e-5)
    start, _ = learning.tiny(0)
    for name, weight in start.named_parameters():
        moved = (expected[name] - weight.detach() * (10 if name == "lm_head.weight" else 1)).abs().max()
        assert (weights[name] - expected[name]).abs().max() < 1e-3 * moved, name


def test_the_loss_is_a_mean_over_all_of_the_steps_tokens() -> None:
    """At a ratio of 1 it is that of the advantages, whatever the micro-batches."""
    model, tokenizer = learning.tiny(0)
    s = replace(SETTINGS, max_tokens=16, updates=1)
    batch, _ = grpo_minimal.rollout(model, tokenizer, ["1 + 2 =", "3 =", "4 + 5 = 9 ="] * 2, s)
    assert len(batch.micro_batches(16)) > 1
    advantages = torch.randn(6)
    forward = learning.WAYS["logitless"](model)
    report = grpo_minimal.update(forward, None, batch, advantages, torch.optim.SGD(model.parameters(), 0.1), s)
    scored = batch.labels != -100
    assert report["loss"] == pytest.approx(-float(batch.pack(advantages, of="sequence")[scored].mean()), abs=1e-6)


def test_it_learns() -> None:
    rows = list(learning.run("logitless", None, replace(learning.TINY, steps=24)))
    assert [row["first_ratio_error"] for row in rows] == [0.0] * 24
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[:5]) / 5 < 0.05
    assert sum(rewards[-5:]) / 5 > 0.25


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for part in learning.tiny(0):
        part.save_pretrained(tmp_path)
    output = tmp_path / "steps.json"
    arguments: list[Any] = ["--steps", 2, "--prompts", 2, "--beta", 0.1, "--layers", 1, "--output", output]
    monkeypatch.setattr(sys, "argv", ["grpo_minimal.py", str(tmp_path), *map(str, arguments)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    grpo_minimal.main()
    rows = json.loads(output.read_text())
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["first_ratio_error"] == 0.0 and row["entropy"] > 0 for row in rows)
    assert capsys.readouterr().out.count("step ") == 2
