"""An optimizer step of TRL's GRPOTrainer with scores from here, against stock TRL and full logits: time, peak memory.

    python benchmarks/trl_step.py [--shape 0.5B | 1.5B] [--sequences 8 --length 4096] [--output results/NAME.json]

A model of random weights in Qwen2.5's shapes, bf16, AdamW, gradient checkpointing, TRL's default loss. All sequences
are one micro-batch, with the same recorded tokens at each step, so that generating and rewarding cost nothing. The
first step of each run warms up and is the gate: its entropy and gradient norm must agree with stock TRL's. A run that
does not fit is reported as such. Needs trl, peft and datasets; on CUDA, logitless-triton.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl_equality import FullLogits

import logitless
from logitless_hf.trl import status, with_logitless

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
RUNS = ("stock", "full logits", "logitless", "logitless, all kept")
DISTS = ("logitless", "logitless-torch", "logitless-triton", "logitless-hf", "trl", "torch", "triton", "transformers")
FIRST_ID, LAST_ID = 10, 5000  # of the recorded tokens


def tokenizer() -> Any:
    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(16)}, unk_token="w3"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", bos_token="w1", eos_token="w2")


def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs between completions."""
    return [float(sum(ids[:64]) % 17) for ids in completion_ids]


def replaying(trainer: Any, length: int) -> Any:
    """The trainer's class, with the same batch of completions of `length` tokens at every step."""

    class Replay(trainer):  # type: ignore[misc]
        batch: dict[str, Any] | None = None

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            ids = torch.randint(
                FIRST_ID, LAST_ID, (len(prompt_ids), length), generator=torch.Generator().manual_seed(0)
            )
            ids[:, -1] = 2  # ends there, so is not cut off
            return ids.tolist(), None

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            if self.batch is None:
                self.batch = super()._generate_and_score_completions(inputs)
            return dict(self.batch)

    return Replay


class Meter(TrainerCallback):  # type: ignore[misc]
    """Seconds and peak bytes of each optimizer step."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.seconds: list[float] = []
        self.peak_bytes: list[int] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            self.peak_bytes.append(torch.cuda.max_memory_allocated())
        self.seconds.append(time.perf_counter() - self.start)


def build(name: str, args: argparse.Namespace, meter: Meter) -> Any:
    vocab = 1000 + LAST_ID if args.shape == "tiny" else 151936
    config = Qwen2Config(
        **SHAPES[args.shape], num_key_value_heads=2, vocab_size=vocab, tie_word_embeddings=True, rope_theta=1e6
    )
    set_seed(0)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    settings = GRPOConfig(
        output_dir="/tmp/trl_step",
        max_steps=1 + args.rounds,
        per_device_train_batch_size=args.sequences,
        num_generations=args.sequences,
        max_completion_length=args.length - args.prompt,
        learning_rate=1e-6,
        beta=0.0,
        bf16=True,
        gradient_checkpointing=True,
        use_cpu=args.device == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer: Any = FullLogits if name == "full logits" else GRPOTrainer
    if name == "logitless":
        trainer = with_logitless(trainer)
    elif name == "logitless, all kept":  # TRL's default loss has no entropy term
        everything = 3 * args.sequences * args.length * vocab
        trainer = with_logitless(trainer, keep_bytes=everything, entropy_grad=False)
    prompt = " ".join(["w5"] * args.prompt)
    return replaying(trainer, args.length - args.prompt)(
        model=model,
        reward_funcs=spread,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": [prompt] * 4}),
        processing_class=tokenizer(),
        callbacks=[meter],
    )


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    meter = Meter(args.device == "cuda")
    try:
        trainer = build(name, args, meter)
        trainer.train()
    except torch.OutOfMemoryError as error:
        return {"not_run": f"out of memory: {str(error).splitlines()[0]}"}
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "seconds": meter.seconds[1:],
        "median_seconds": statistics.median(meter.seconds[1:]),
        "warm_up_seconds": meter.seconds[0],
        "peak_bytes": max(meter.peak_bytes[1:], default=None),
        "first_step": {metric: log[0][metric] for metric in ("loss", "entropy", "grad_norm")},
        "scored_here": {key: value.calls for key, value in status(trainer).items()},
    }


def check(found: dict[str, Any]) -> None:
    """Stop here if a run trains something else. TRL rounds logits to bf16, so it agrees to about that."""
    base = found["stock"].get("first_step")
    for name, run in found.items():
        if base and "first_step" in run:
            got = run["first_step"]
            if abs(got["entropy"] - base["entropy"]) > 0.02 or abs(got["grad_norm"] / base["grad_norm"] - 1) > 0.05:
                raise SystemExit(f"{name}: {got}, stock: {base}; not timed")
            if (name.startswith("logitless")) != bool(run["scored_here"]):
                raise SystemExit(f"{name}: scored here: {run['scored_here']}; not timed")


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for dist in DISTS:
        try:
            found[dist] = version(dist)
        except PackageNotFoundError:
            found[dist] = None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--prompt", type=int, default=96, help="of which the prompt's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    found = {}
    for name in args.runs:
        found[name] = measure(name, args)
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        print(name, json.dumps(found[name]), flush=True)
    check(found)
    card = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    tokens = args.sequences * args.length
    print(f"{card}, {args.shape}, {tokens} tokens, medians of {args.rounds} steps")
    for name, run in found.items():
        if "not_run" in run:
            print(f"  {name:22s} {run['not_run']}")
        else:
            print(f"  {name:22s} {run['median_seconds']:7.3f} s {(run['peak_bytes'] or 0) / 2**30:7.2f} GiB")
    if args.output:
        record = {
            "date": date.today().isoformat(),
            "card": card,
            "backends": [f"{item.name} {item.version}" for item in logitless.backends() if item.ok],
            "versions": versions(),
            "settings": {key: str(value) for key, value in vars(args).items() if key != "output"},
            "model": SHAPES[args.shape],
            "tokens": tokens,
            "runs": found,
        }
        args.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
