"""One real model, every layout: the same log-probabilities padded, packed and nested, in one process and under FSDP2.

    python examples/layouts.py MODEL [--records FILE] [--count 8] [--length 64]

The model is in float32. The yardstick is each sequence alone, its hidden states times the head in float64, since the
model's own float32 logits are rounded themselves: the first row says by how much. Under FSDP2 two gloo processes each
hold half of every parameter and score half of the sequences. Exits with 1 if a layout is off by more than 2e-5 nats.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import logitless
from logitless import PackedBatch
from logitless.testing.distributed import run_ranks
from logitless_hf import unbind

TOLERANCE = 2e-5  # nats
LAYOUTS = ("padded", "packed", "nested")
RANKS = 2


def load(path: Path) -> Any:
    """The model in float32, in eval mode."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


def read(path: Path, tokenizer: Any, count: int, length: int) -> list[Tensor]:
    """Token ids of the first records that have a prompt and a completion, cut to at most `length`."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [row["prompt"] + row["completion"] for row in rows if "prompt" in row][:count]
    return [torch.tensor(tokenizer(text)["input_ids"][:length]) for text in texts]


@torch.no_grad()
def by_logits(model: Any, sequences: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Log-probabilities of each sequence alone, with the product of the head in `dtype`; 0 at its end."""
    found = []
    for ids in sequences:
        hidden = model.model(input_ids=ids.unsqueeze(0), use_cache=False).last_hidden_state[0, :-1]
        log_p = (hidden.to(dtype) @ model.lm_head.weight.to(dtype).T).log_softmax(-1)
        picked = log_p.gather(-1, ids[1:].unsqueeze(-1)).squeeze(-1)
        found.append(torch.nn.functional.pad(picked, (0, 1)))
    return found


@torch.no_grad()
def by_layout(model: Any, layout: str, sequences: list[Tensor]) -> list[Tensor]:
    """The same by logitless: right-padded rows, one packed row, or that row from a nested tensor."""
    if layout == "nested":
        batch = PackedBatch.from_nested(torch.nested.nested_tensor(sequences, layout=torch.jagged))
    else:
        batch = PackedBatch.from_sequences(sequences)
    forward = logitless.make_forward(model, {"padded": "bshd", "packed": "thd", "nested": "nested"}[layout])
    scores = batch.unpack(forward(batch, entropy=False).log_probs)
    unbind(model)
    return list(scores.unbind()) if layout == "nested" else scores


def on_a_rank(rank: int, size: int, path: Path, sequences: list[Tensor]) -> dict[str, list[Tensor]]:
    """Scores of this rank's sequences, by a model of which it holds a part."""
    model, mesh = load(path), init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)  # gathered once for all these forwards
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return {layout: by_layout(model, layout, sequences[rank::size]) for layout in LAYOUTS}


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, in nats."""
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def main() -> int:
    """Run all; 0 if everything agrees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a checkpoint, e.g. what fetch_model.py makes")
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "data" / "records.jsonl")
    parser.add_argument("--count", type=int, default=8, help="sequences")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence, at most")
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        sys.exit(f"{options.model}: no checkpoint there; make one by `python examples/fetch_model.py {options.model}`")
    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    sequences = read(options.records, tokenizer, options.count, options.length)
    model = load(options.model)
    expected = by_logits(model, sequences, torch.float64)
    own = worst(by_logits(model, sequences, torch.float32), expected)
    differences = {(layout, "one process"): worst(by_layout(model, layout, sequences), expected) for layout in LAYOUTS}
    del model
    found = run_ranks(RANKS, on_a_rank, options.model, sequences, seconds=600.0)
    for layout in LAYOUTS:
        differences[layout, f"{RANKS} FSDP2 ranks"] = max(
            worst(found[rank][layout], expected[rank::RANKS]) for rank in range(RANKS)
        )
    lengths = [len(ids) for ids in sequences]
    table = Table("layout", "where", "max |Δ log_prob|, nats", title=f"{len(lengths)} sequences, {sum(lengths)} tokens")
    table.add_row("own logits, float32", "one process", f"{own:.1e}")
    for (layout, where), value in differences.items():
        table.add_row(layout, where, f"{value:.1e}")
    Console().print(table)
    return 0 if max(differences.values()) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
