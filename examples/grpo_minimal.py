"""GRPO on one page, to copy from: sample, reward, advantages, old log-probs, clipped updates, and never the logits.

    python examples/grpo_minimal.py MODEL [--steps 30] [--beta 0.04] [--output steps.json] ...

MODEL is the folder of a transformers model. `sums` and `reward` are the task, small sums; the rest is for any task. In
training the model runs over packed micro-batches, sequences in one row without padding, and each one's loss and
gradients are made in a single pass over the head. No dropout: the model stays in eval mode, so that the same policy
gives the same log-probs to the bit, and the first ratio is exactly 1.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import logitless
from logitless import ForwardFn, PackedBatch, TokenLogProbs, losses


@dataclass(frozen=True)
class Settings:
    """What the command line can set."""

    steps: int = 30
    prompts: int = 8  # to a step
    samples: int = 4  # replies to a prompt, a group
    new_tokens: int = 3  # at most, of a reply
    updates: int = 2  # with the same replies
    max_tokens: int = 2048  # of a micro-batch
    temperature: float = 1.0
    learning_rate: float = 1e-4
    clip: float = 0.2
    beta: float = 0.0  # weight of the KL to the model as it was
    layers: int = 4  # the last ones are trained, and nothing else; 0 trains all parameters
    seed: int = 0


# --- the task -------------------------------------------------------------------------------------------------------


def sums(count: int, rng: random.Random) -> list[tuple[str, int]]:
    """Prompts, and what is right."""
    pairs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(count)]
    return [(f"{a} + {b} =", a + b) for a, b in pairs]


def reward(reply: str, right: int) -> float:
    """1 for a reply that begins with the right number, less by 0.2 for each that it is off, and 0 for anything else."""
    found = re.match(r"\s*(\d+)\b", reply)
    return 0.0 if found is None else max(0.0, 1.0 - 0.2 * abs(int(found[1]) - right))


# --- the loop -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def rollout(model: Any, tokenizer: Any, prompts: list[str], s: Settings) -> tuple[PackedBatch, list[str]]:
    """A sampled reply to each prompt: all tokens packed, those of the replies as labels; and the replies' text."""
    asked = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    tokens = model.generate(
        **asked,
        do_sample=True,
        temperature=s.temperature,
        top_k=0,  # no filter of any kind: what is sampled from is what is scored
        top_p=1.0,
        max_new_tokens=s.new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    replies = tokens[:, asked.input_ids.shape[1] :]
    is_end = (replies == tokenizer.eos_token_id).long()
    sampled = (is_end.cumsum(1) - is_end == 0).long()  # up to the first EOS, and that one too
    batch = PackedBatch.from_padded(
        tokens,
        torch.cat([asked.attention_mask, sampled], 1),
        loss_mask=torch.cat([torch.zeros_like(asked.attention_mask), sampled], 1),
    )
    return batch, tokenizer.batch_decode(replies, skip_special_tokens=True)


def policy_loss(
    batch: PackedBatch, old: Tensor, reference: Tensor | None, advantages: Tensor, total: int, s: Settings
) -> Any:
    """What a forward takes as `loss_fn`: a chunk's scores and its tokens' places in, their shares of the loss out."""
    advantage = batch.pack(advantages[list(batch.sequences)], of="sequence")
    weight = losses.token_mean_weights(batch.labels, total)

    def loss_fn(scores: TokenLogProbs, i: Tensor) -> Tensor:
        clips = {"clip_low": s.clip, "clip_high": s.clip}
        ref = None if reference is None else reference[i]
        return weight[i] * losses.grpo(scores.log_probs, old[i], advantage[i], ref, beta=s.beta, **clips)

    return loss_fn


def update(
    forward: ForwardFn,
    reference: ForwardFn | None,
    batch: PackedBatch,
    advantages: Tensor,
    optimizer: torch.optim.Optimizer,
    s: Settings,
) -> dict[str, float]:
    """Clipped policy-gradient updates with one batch of replies; `advantages` [B] are their sequences'."""
    micro_batches = batch.micro_batches(s.max_tokens)
    total = losses.count_tokens(micro_batches)
    old, references = [], []
    with torch.no_grad():
        for micro in micro_batches:
            old.append(forward(micro, temperature=s.temperature))
            references.append(reference and reference(micro, temperature=s.temperature, entropy=False).log_probs)
    report = {"entropy": sum(float(out.entropy.sum()) for out in old) / total, "loss": 0.0, "first_ratio_error": 0.0}
    for n in range(s.updates):
        for micro, before, ref in zip(micro_batches, old, references, strict=True):
            loss_fn = policy_loss(micro, before.log_probs, ref, advantages, total, s)
            out = forward(micro, temperature=s.temperature, entropy=False, loss_fn=loss_fn)
            out.loss.backward()
            report["loss"] += out.loss.item() / s.updates
            if n == 0:
                error = ((out.log_probs - before.log_probs).exp() - 1).abs().max()
                report["first_ratio_error"] = max(report["first_ratio_error"], float(error))
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return report


def train(
    model: Any, tokenizer: Any, forward: ForwardFn, s: Settings, reference: ForwardFn | None = None
) -> Iterator[dict[str, float]]:
    """The whole loop; what each step saw."""
    torch.manual_seed(s.seed)
    rng = random.Random(s.seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], s.learning_rate, weight_decay=0.0)
    group = torch.arange(s.prompts, device=model.device).repeat_interleave(s.samples)
    for step in range(s.steps):
        tasks = [task for task in sums(s.prompts, rng) for _ in range(s.samples)]
        batch, replies = rollout(model, tokenizer, [prompt for prompt, _ in tasks], s)
        rewards = torch.tensor([reward(reply, right) for reply, (_, right) in zip(replies, tasks, strict=True)])
        advantages = losses.group_advantages(rewards.to(model.device), group)
        report = update(forward, reference, batch, advantages, optimizer, s)
        yield {"step": step, "reward": float(rewards.mean()), **report}


def load(path: str, s: Settings) -> tuple[Any, Any]:
    """A model in float32 on the GPU, if there is one, with what is trained marked; and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    if s.layers:
        model.requires_grad_(False)
        model.base_model.layers[-s.layers :].requires_grad_(True)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def main() -> None:
    """Train the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a causal model and its tokenizer")
    parser.add_argument("--output", type=Path, help="JSON file for a row of each step")
    for field in fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args())
    path, output, s = given.pop("model"), given.pop("output"), Settings(**given)

    model, tokenizer = load(path, s)
    reference = logitless.make_forward(copy.deepcopy(model).requires_grad_(False)) if s.beta else None
    forward = logitless.make_forward(model)
    rows = []
    for row in train(model, tokenizer, forward, s, reference):
        rows.append(row)
        print(", ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
    if output:
        output.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
