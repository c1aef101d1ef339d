"""A few policy-gradient steps on a bound model: samples, a reward that can be verified, PPO's clipped ratio.

    python examples/policy_gradient.py MODEL OUTPUT [STEPS]

The task is a sum; a reply that begins with a number earns 0.5, and 1 if the number is right. Only the last layers are
trained, so that a step takes seconds on a CPU; the head is frozen and costs no weight gradient. OUTPUT is JSON, a row
for each step.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import logitless_hf

QUESTIONS, SAMPLES, NEW_TOKENS = 4, 5, 3
TRAINED_LAYERS, LEARNING_RATE = 4, 5e-4
CLIP, UPDATES = 0.2, 2


def reward(reply: str, right: int) -> float:
    """Half for a reply that begins with a number, and half if the number is right."""
    found = re.match(r"\s*(\d+)\b", reply)
    return 0.0 if found is None else 0.5 + 0.5 * (int(found[1]) == right)


def policy_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """PPO's clipped surrogate, a mean over the tokens of the replies; all [B, T] but advantages [B]."""
    ratio = (log_probs - old_log_probs).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
    return -(gain * mask).sum() / mask.sum()


@torch.no_grad()
def sample(model: Any, tokenizer: Any) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Replies to some questions: the batch to score, its rewards [B], and which tokens the policy chose [B, T]."""
    sums = [(random.randint(1, 9), random.randint(1, 9)) for _ in range(QUESTIONS)]
    texts = [f"Q: What is {a} + {b}?\nA:" for a, b in sums for _ in range(SAMPLES)]
    prompt = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    tokens = model.generate(
        **prompt, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, pad_token_id=tokenizer.pad_token_id
    )
    width = prompt.input_ids.shape[1]
    replies = tokens[:, width:]
    ended = (replies == tokenizer.eos_token_id).cumsum(1)
    chosen = torch.zeros_like(tokens, dtype=torch.bool)
    chosen[:, width:] = (ended == 0) | ((ended == 1) & (replies == tokenizer.eos_token_id))
    rewards = torch.tensor(
        [
            reward(tokenizer.decode(reply, skip_special_tokens=True), sum(sums[row // SAMPLES]))
            for row, reply in enumerate(replies)
        ]
    )
    attention_mask = torch.cat([prompt.attention_mask, torch.ones_like(replies)], 1)
    return {"input_ids": tokens, "attention_mask": attention_mask}, rewards, chosen


def main() -> None:
    """Sample, score, reward and update, as often as the command line says."""
    path, output, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 6
    random.seed(0)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    model.requires_grad_(False)
    for layer in model.model.layers[-TRAINED_LAYERS:]:
        layer.requires_grad_(True)
    logitless_hf.bind(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], LEARNING_RATE, weight_decay=0)

    rows = []
    for step in range(steps):
        batch, rewards, chosen = sample(model, tokenizer)
        # Position t scores token t + 1; tokens of the prompt are not scored and cost the head nothing.
        labels = batch["input_ids"].masked_fill(~chosen, -100).roll(-1, 1)
        labels[:, -1] = -100
        mask = labels != -100
        groups = rewards.view(QUESTIONS, SAMPLES)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()

        old = entropy = None
        for _ in range(UPDATES):
            out = model(**batch, shift_labels=labels, return_log_probs=True, entropy_grad=False)
            if old is None:
                old, entropy = out.log_probs.detach(), out.entropy[mask].mean().item()
            loss = policy_loss(out.log_probs, old, advantages, mask)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        earned = rewards.mean().item()
        rows.append({"step": step, "reward": earned, "entropy": entropy, "loss": loss.item()})
        print(
            f"step {step + 1}/{steps}: mean reward {earned:.2f}, mean entropy {entropy:.2f} nats",
            flush=True,
        )
    output.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
