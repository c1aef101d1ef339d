"""What binding adds to a forward besides the head: the bound model's scoring call less its trunk and its op.

    python benchmarks/binding.py [--model PATH] [--tokens 256] [--rounds 30]

The trunk and the op are timed within the bound call (by hooks around `model.model` and a clock around the op), so that
their own times, which vary by more than the overhead, drop out; medians over rounds are told. The trunk alone is timed
in turn with it, to see that it takes the same within. Before that the bound call's scores are compared with those of
the two steps and must be equal.
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
from logitless_hf import scoring

SMALL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SMALL |= {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}  # the shape of SmolLM2-135M


class Clock:
    """Seconds spent in what is timed within one call."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.begun = 0.0

    def begin(self, *_: Any) -> None:
        self.begun = time.perf_counter()

    def end(self, name: str) -> None:
        self.spent[name] = time.perf_counter() - self.begun

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            result = function(*args, **kwargs)
            self.end(name)
            return result

        return timed


@torch.no_grad()
def measure(model: Any, tokens: int, rounds: int) -> dict[str, Any]:
    begun, busy = time.perf_counter(), time.process_time()
    logitless_hf.bind(model)
    bound_in = {"bind_wall_s": time.perf_counter() - begun, "bind_cpu_s": time.process_time() - busy}
    ids = torch.randint(5, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    weight = model.get_output_embeddings().weight
    positions = torch.arange(tokens).unsqueeze(0)

    def trunk() -> Any:
        return model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state

    def bound() -> Any:
        return model(input_ids=ids, position_ids=positions, shift_labels=labels, use_cache=False, return_log_probs=True)

    if not torch.equal(bound().log_probs, logitless.linear_log_probs(trunk(), weight, labels).log_probs):
        raise SystemExit("the bound call's scores are not those of the trunk and the op: nothing was timed")
    clock, times = Clock(), []
    model.model.register_forward_pre_hook(clock.begin)
    model.model.register_forward_hook(lambda *_: clock.end("trunk within"))
    scoring.linear_log_probs = clock.around("op within", scoring.linear_log_probs)
    for _ in range(rounds):
        trunk()
        alone = clock.spent["trunk within"]
        begun = time.perf_counter()
        bound()
        found = {"bound": time.perf_counter() - begun, **clock.spent, "trunk alone": alone}
        found["overhead"] = found["bound"] - found["trunk within"] - found["op within"]
        times.append(found)
    medians = {f"{name}_s": statistics.median(found[name] for found in times) for name in times[0]}
    return {**bound_in, **medians, "overhead_of_trunk": medians["overhead_s"] / medians["trunk within_s"]}


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
