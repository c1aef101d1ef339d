"""The ordinary way to score a file, to compare `logitless score` with: the model's own logits and their log_softmax.

    python examples/score_by_logits.py MODEL RECORDS OUTPUT TOKENS_PER_BATCH

Its batches are of as many tokens, in padded rows, so that its peak memory can be set against that of
`logitless score`; all else is plain transformers and torch. OUTPUT is JSONL with `token_ids`, `log_probs` and
`entropy` of every completion.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from logitless_hf.score.batches import TokenSequence, pack, plan


def encode(tokenizer: Any, record: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Prompt and completion; this model's tokenizer adds no BOS and no dummy prefix, so nothing is to be minded."""
    if "input_ids" in record:
        border = record["prompt_length"]
        return record["input_ids"][:border], record["input_ids"][border:]
    if "messages" in record:
        last = max(i for i, turn in enumerate(record["messages"]) if turn["role"] == "assistant")
        prompt = tokenizer.apply_chat_template(record["messages"][:last], tokenize=False, add_generation_prompt=True)
        completion = record["messages"][last]["content"] + tokenizer.eos_token
    else:
        prompt, completion = record["prompt"], record["completion"]
    return tokenizer(prompt)["input_ids"], tokenizer(completion)["input_ids"]


@torch.no_grad()
def main() -> None:
    """Score the records that the command line names."""
    model_path, records, output, tokens_per_batch = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True).eval()
    sequences = []
    for number, line in enumerate(Path(records).read_text(encoding="utf-8").splitlines()):
        prompt, completion = encode(tokenizer, json.loads(line))
        sequences.append(TokenSequence(number, prompt + completion, len(prompt)))

    rows: list[dict[str, Any]] = [{} for _ in sequences]
    batches = plan([len(sequence.ids) for sequence in sequences], int(tokens_per_batch), padded=True)
    for indices in track(batches, "scoring by logits"):
        batch = pack([sequences[index] for index in indices], model.device).to_padded()
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        log_p = logits.log_softmax(-1)
        log_probs = log_p.gather(-1, batch.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        for row, index in enumerate(indices):
            sequence = sequences[index]
            scored = slice(sequence.prompt_length - 1, len(sequence.ids) - 1)
            rows[index] = {
                "token_ids": sequence.ids[sequence.prompt_length :],
                "log_probs": log_probs[row, scored].tolist(),
                "entropy": entropy[row, scored].tolist(),
            }
    Path(output).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
