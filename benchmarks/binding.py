"""What binding adds to a forward besides the head: the bound model's scoring call against its trunk and the op.

    python benchmarks/binding.py [--model PATH] [--tokens 256] [--rounds 30]

The sides run in turn within each round, so that whatever else the machine does falls on all of them: the trunk alone
(`model.model(...)`), the op alone on the trunk's hidden states, and the bound call, which does both. The overhead is
`bound - trunk - op`, of each round, relative to the trunk; the median over rounds is told. Binding itself is timed in
processor seconds. Before anything is timed, the bound call's scores are compared with the two steps' and must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import logitless
import logitless_hf

SMALL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SMALL |= {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}  # the shape of SmolLM2-135M


def timed(function: Callable[[], Any], clock: Callable[[], float]) -> tuple[float, Any]:
    begin = clock()
    result = function()
    return clock() - begin, result


@torch.no_grad()
def measure(model: Any, tokens: int, rounds: int) -> dict[str, Any]:
    bind_wall = time.perf_counter()
    bind_cpu, _ = timed(lambda: logitless_hf.bind(model), time.process_time)
    bind_wall = time.perf_counter() - bind_wall
    ids = torch.randint(5, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    weight = model.get_output_embeddings().weight
    positions = torch.arange(tokens).unsqueeze(0)

    def trunk() -> Any:
        return model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state

    def bound() -> Any:
        return model(input_ids=ids, position_ids=positions, shift_labels=labels, use_cache=False, return_log_probs=True)

    def op(hidden: Any) -> Any:
        return logitless.linear_log_probs(hidden, weight, labels)

    if not torch.equal(bound().log_probs, op(trunk()).log_probs):
        raise SystemExit("the bound call's scores are not those of the trunk and the op: nothing was timed")
    sides: dict[str, list[float]] = {"trunk": [], "op": [], "bound": [], "overhead": []}
    for clock in (time.perf_counter, time.process_time):
        for turn in range(rounds):
            found = {}
            order = [("bound", bound), ("trunk", trunk)]
            for name, function in order if turn % 2 else reversed(order):
                found[name], result = timed(function, clock)
                if name == "trunk":
                    found["op"], _ = timed(lambda hidden=result: op(hidden), clock)
            found["overhead"] = (found["bound"] - found["trunk"] - found["op"]) / found["trunk"]
            for name, value in found.items():
                sides.setdefault(f"{name} ({clock.__name__})", []).append(value)
    medians = {name: statistics.median(values) for name, values in sides.items() if values}
    return {"bind_cpu_s": bind_cpu, "bind_wall_s": bind_wall, "medians": medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint's folder; without it, random weights of that shape")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/binding.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    else:
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
    found = measure(model.eval(), options.tokens, options.rounds)
    found |= {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread, load {os.getloadavg()[0]:.1f}",
        "model": str(options.model.name if options.model else "random weights, the shape of SmolLM2-135M"),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": options.tokens,
        "rounds": options.rounds,
        "versions": {name: version(name) for name in ("torch", "transformers", "logitless", "logitless-hf")},
    }
    options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
